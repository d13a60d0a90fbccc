"""Pretraining rows: whole conversations, weighted as said, the same for the same seed."""

import itertools

import numpy as np
import pytest

from demo import corpus, rows
from demo import tokenizer as demo_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    records = itertools.islice(corpus.records("pretrain", seed=0), 300)
    return demo_tokenizer.train(text for record in records for text in (record.prompt, record.reply))


@pytest.fixture(scope="module")
def step(tokenizer):
    return next(rows.steps(tokenizer, seed=0))


def test_a_step_has_the_rows_of_each_width(step):
    assert [group.token_ids.shape for group in step] == [(count, width) for width, count in rows.ROWS_OF_WIDTH.items()]


def test_a_row_is_the_templated_conversation_of_a_corpus_record(tokenizer):
    written = {(r.prompt, r.reply) for r in itertools.islice(corpus.records("pretrain", seed=3), 60)}
    ids, _ = next(rows.conversations(tokenizer, seed=3))
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert any(
        text.startswith(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{reply}<|im_end|>")
        for prompt, reply in written
    )


def test_replies_weigh_one_prompts_less_and_padding_nothing(tokenizer, step):
    opening = tokenizer.encode("<|im_start|>assistant\n").ids
    pairs = [pair for group in step for pair in zip(group.token_ids, group.weights, strict=True)]
    for ids, weights in pairs:
        length = int(np.flatnonzero(ids == tokenizer.token_to_id("<|im_end|>"))[-1]) + 1
        assert not ids[length:].any() and not weights[length:].any() and weights[0] == 0
        begins = next(i for i in range(length) if ids[i : i + len(opening)].tolist() == opening) + len(opening)
        ends = begins + ids[begins:].tolist().index(tokenizer.token_to_id("<|im_end|>"))
        assert np.all(weights[1:begins] == np.float32(0.3)), "the prompt, assistant's opening included"
        assert np.all(weights[begins : ends + 1] == 1), "the reply and its end of turn"


def test_some_conversations_have_a_second_turn(tokenizer):
    texts = [
        tokenizer.decode(ids, skip_special_tokens=False)
        for ids, _ in itertools.islice(rows.conversations(tokenizer, seed=1), 120)
    ]
    turns = [text.count("<|im_start|>user") for text in texts]
    assert set(turns) == {1, 2} and 2 <= turns.count(2) <= 30


def test_the_same_seed_gives_the_same_steps(tokenizer, step):
    again = next(rows.steps(tokenizer, seed=0))
    assert all(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(step, again, strict=True))
    other = next(rows.steps(tokenizer, seed=1))
    assert not np.array_equal(step[0].token_ids, other[0].token_ids)
