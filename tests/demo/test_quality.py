"""Quality of replies, on replies made by hand."""

import dataclasses
import itertools

import pytest

from demo import corpus, quality
from demo import tokenizer as demo_tokenizer
from lilicorr_jax import config
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
    found = quality.assess("sort", tokenizer, Target(config.demo().target), [right] * 4 + [other], replies)
    assert (found.count, found.ended, found.degenerate) == (4, 0.5, 0.25)
    assert found.exact == 0.5, "the reply that was cut off says the right thing too"
    assert found.tokens == pytest.approx((2 * (len(good) + 1) + len(good) + 40) / 4)
