"""Batched decoding of many prompts in few rows, against each prompt alone without any cache."""

from dataclasses import replace

import pytest

from tests.pairs import TARGET, plain_text, prompt, tiny_parameters
from train.decoder import Decoder, Ended, Sampling

STOP = 3
PROMPTS = {"a": (3, 9), "b": (17, 30), "c": (9, 1), "d": (14, 12), "e": (60, 20)}  # length, max_tokens


def answers(prompts: dict[str, tuple[int, int]], *, eos_ids=(STOP,), num_rows=3, **options) -> dict[str, Ended]:
    decoder = Decoder(
        replace(TARGET, eos_ids=eos_ids), tiny_parameters()["target"], num_rows=num_rows, context_limit=80, **options
    )
    waiting, ended = list(prompts.items()), {}
    while waiting or not decoder.is_idle:
        while waiting and decoder.num_free:
            name, (length, max_tokens) = waiting.pop(0)
            decoder.admit(name, prompt(length), max_tokens, seed=length)
        ended |= {one.job: one for one in decoder.step()}
    return ended


@pytest.fixture(scope="module")
def ended() -> dict[str, Ended]:
    return answers(PROMPTS)


@pytest.mark.parametrize("name", PROMPTS)
def test_an_answer_is_the_targets_own_text_up_to_its_first_stop(ended, name):
    length, max_tokens = PROMPTS[name]
    text = plain_text(prompt(length), 30)[:max_tokens]
    expected = text[: text.index(STOP) + 1] if STOP in text else text
    assert tuple(ended[name].token_ids) == tuple(expected)
    assert ended[name].is_truncated == (STOP not in text)


def test_the_cases_end_in_every_way(ended):
    """One at its very first token, one at a stop, one at the limit, one across dispatches."""
    assert {one.is_truncated for one in ended.values()} == {True, False}
    assert min(len(one.token_ids) for one in ended.values()) == 1


def test_a_drawn_answer_follows_from_its_seed_whatever_shares_the_batch():
    drawn = dict(eos_ids=(), sampling=Sampling(temperature=1.0, top_k=4), steps_at_once=8)
    alone = answers({"d": PROMPTS["d"]}, **drawn)["d"]
    assert answers({name: PROMPTS[name] for name in "acd"}, **drawn)["d"] == alone
    assert alone.token_ids != list(plain_text(prompt(14), 12))


def test_an_answer_that_does_not_fit_is_refused():
    decoder = Decoder(TARGET, tiny_parameters()["target"], num_rows=1, context_limit=20)
    with pytest.raises(ValueError, match="answer of 11 tokens behind a prompt of 10 does not fit a context of 20"):
        decoder.admit("x", prompt(10), 11)
