"""Quality of replies, on replies made by hand."""

import dataclasses
import itertools

import pytest

from demo import corpus, quality
from demo import tokenizer as demo_tokenizer
from lilicorr_jax import presets
from lilicorr_jax.models.target import Target


@pytest.fixture(scope="module")
def tokenizer():
    records = itertools.islice(corpus.records("pretrain", seed=0), 100)
    return demo_tokenizer.train(text for record in records for text in (record.prompt, record.reply))


def test_shares_count_what_ends_what_loops_and_what_is_right(tokenizer):
    end = tokenizer.token_to_id("<|im_end|>")
    right = corpus.Record(category="sort", prompt="Sort: b, a", reply="a, b")
    other = dataclasses.replace(right, category="math")
    good, wrong = tokenizer.encode("a, b").ids, tokenizer.encode("b, a").ids
    replies = [[*good, end], [*wrong, end], good, [5] * 40, [*good, end]]
    found = quality.assess("sort", tokenizer, Target(presets.demo().target), [right] * 4 + [other], replies)
    assert (found.count, found.ended, found.degenerate) == (4, 0.5, 0.25)
    assert found.exact == found.right == 0.5, "the reply that was cut off says the right thing too"
    assert found.tokens == pytest.approx((2 * (len(good) + 1) + len(good) + 40) / 4)


def test_the_answer_is_what_no_wording_changes():
    worded, plain = (
        list(itertools.islice(corpus.records("pretrain", seed=4, noise=noise), 300)) for noise in (0.9, 0.0)
    )
    differ = 0
    for one, other in zip(worded, plain, strict=True):
        if one.category in ("sort", "code", "math"):
            assert quality.answer(one.category, one.reply) == quality.answer(one.category, other.reply), one
            differ += one.reply != other.reply
    assert differ > 100


@pytest.mark.parametrize(
    ("category", "reply", "wrong"),
    [
        ("math", "Ben starts with 5. 5 + 1 = 6. Ben has 6 eggs.", "Ben starts with 5. 5 + 1 = 6. Ben has 7 eggs."),
        ("sort", "Done.\n1. 3\n2. 12\nFrom 3 to 12.", "Done.\n1. 12\n2. 3\nFrom 3 to 12."),
        ("code", "def f(x):\n    return x\nassert f([1]) == [1]", "def f(x):\n    return x\nassert f([1]) == [2]"),
        ("record", "* Name is Mia\n* Age is 7", "* Name is Mia\n* Age is 8"),
        ("story", "Leo met a shy owl by the lake.", "Leo met a shy cat by the lake."),
    ],
)
def test_another_content_is_another_answer(category, reply, wrong):
    assert quality.answer(category, reply) != quality.answer(category, wrong)


@pytest.mark.parametrize(
    ("category", "reply", "words"),
    [
        ("sort", "The 3 numbers in order:\nFirst comes 2, then comes 3, and 9 is last.", "2 3 9"),
        ("sort", "(1) fig\n(2) kiwi\nThe first is fig and the last is kiwi.", "fig kiwi"),
        ("math", "At first there are 5 eggs. 5 - 2 = 3. That leaves 3 eggs for Mia.", "3"),
        ("record", "* Name is Mia (new)\n* Age is 7", "name mia new age 7"),
        ("record", "name = Mia (new)\nage = 7", "name mia new age 7"),
    ],
)
def test_answers_read_by_hand(category, reply, words):
    assert quality.answer(category, reply) == words.split()
