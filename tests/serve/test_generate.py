"""One streamed reply: the text that the target alone would write, and numbers that fit it."""

import io
import re

import numpy as np
import pytest

from lilicorr_jax.conversion.checkpoint import load_target
from serve import gap, generate, workload
from serve.engine import Block, Engine, Event, Reply, Request, Times
from serve.stream import TextStream
from tests.serve.conftest import CONTEXT, END, WORDS

PROMPT = "round and round it goes"


def arguments(folders, **changes) -> list[str]:
    values = {"target": folders / "target", "drafter": folders / "hf", "prompt": PROMPT, "max_new_tokens": 20}
    return [f"--{name}={value}" for name, value in (values | changes).items()]


def greedy_text(folders, config: generate.GenerateConfig) -> str:
    """The target's likeliest tokens, the whole text run anew for each, no cache, no block, no engine."""
    tokenizer = workload.load_tokenizer(config.target)
    target, params = load_target(config.target)
    text = prompt_ids = workload.templated(tokenizer, config.prompt)
    while len(text) < len(prompt_ids) + config.max_new_tokens and text[len(prompt_ids) :][-1:] != (WORDS.index(END),):
        text += (int(np.argmax(gap.next_logits(target, params, text))),)
    return tokenizer.decode(text[len(prompt_ids) :], skip_special_tokens=True)


def test_the_reply_is_the_target_s_own_and_the_numbers_fit_it(folders, capsys):
    config = generate.GenerateConfig(
        target=str(folders / "target"), drafter=str(folders / "hf"), prompt=PROMPT, max_new_tokens=20
    )
    assert generate.main(arguments(folders)) == 0
    printed = capsys.readouterr()
    assert printed.out == greedy_text(folders, config) + "\n" != "\n"
    emitted = [int(n) for n in re.findall(r"\d+", re.findall("tokens per block: (.*)", printed.err)[0])]
    tau, tokens, blocks = re.findall(r"tau ([\d.]+) .*, (\d+) tokens in (\d+) blocks", printed.err)[0]
    assert (int(blocks), int(tokens)) == (len(emitted), 1 + sum(emitted))
    assert float(tau) == pytest.approx(sum(emitted) / len(emitted), abs=0.005)


class Scripted(Engine):
    """Commits given blocks, one a dispatch, behind the prefill's token 2."""

    def __init__(self, blocks):
        self.blocks, self.sent = blocks, []

    @property
    def num_pending(self) -> int:
        return len(self.sent)

    def admit(self, requests):
        return [Event(requests[0].id, (2,), None)]

    def dispatch(self) -> bool:
        newest, self.blocks = self.blocks[:1], self.blocks[1:]
        self.sent += newest
        return bool(newest)

    def retire(self):
        block, self.sent = self.sent[0], self.sent[1:]
        times = Times(sent_s=0.0, first_s=0.0, last_s=0.0)
        reply = Reply(id="prompt", token_ids=(), finish_reason="stop", blocks=(), times=times)
        return [Event("prompt", block, reply if not (self.blocks or self.sent) else None)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        (io.StringIO, "so it goes round and on\n"),
        (Terminal, "so it goes\x1b[2m[2]\x1b[0m round\x1b[2m[1]\x1b[0m and on\x1b[2m[3]\x1b[0m\n"),
    ],
)
def test_a_terminal_shows_the_tokens_of_each_block_and_no_other_output_does(folders, out, expected):
    text = TextStream(workload.load_tokenizer(folders / "target"))
    shown = out()
    generate.stream(Scripted([(3, 4), (5,), (6, 7, 0)]), Request(id="prompt", prompt_ids=(2,)), text, shown)
    assert shown.getvalue() == expected


def test_the_summary_is_computed_by_hand():
    blocks = tuple(Block(emitted=e, accepted=e - 1, proposed=5) for e in (4, 1, 3))
    times = Times(sent_s=10.0, first_s=10.5, last_s=12.0)
    reply = Reply(id="x", token_ids=tuple(range(9)), finish_reason="stop", blocks=blocks, times=times)
    assert generate.summary(reply) == (
        "tokens per block: 4 1 3\n"
        "tau 2.67 tokens per block (the target's own token included), 9 tokens in 3 blocks and 2.00 s, "
        "4.5 tokens/s, ended by stop"
    )


def test_a_reply_without_blocks_has_no_tau():
    reply = Reply(
        id="x", token_ids=(1,), finish_reason="stop", blocks=(), times=Times(sent_s=0.0, first_s=1.0, last_s=1.0)
    )
    assert generate.summary(reply).startswith("tokens per block: -\ntau - tokens per block")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"prompt": " "}, "--prompt must hold a visible character; got ' '"),
        ({"max_new_tokens": 0}, "--max_new_tokens must be at least 1; got 0"),
        ({"drafter": "none"}, "--method=lilicorr drafts; give --drafter"),
        (
            {"temperature": -1, "method": "ar", "drafter": "none"},
            "temperature must be finite and not negative; got -1.0",
        ),
        ({"proposal": "random"}, "random"),
        ({"target": "nowhere"}, "nowhere"),
        (
            {"prompt": "so " * 100, "method": "ar", "drafter": "none"},
            f"shorter than the context limit of {CONTEXT} tokens; got 102",
        ),
    ],
)
def test_bad_input_ends_with_one_sentence_and_code_two(folders, changes, sentence, capsys):
    assert generate.main(arguments(folders, **changes)) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err and printed.out == "" and len(printed.err.strip().splitlines()) == 1


def test_help_shows_examples(capsys):
    assert generate.main(["--help"]) == 0
    assert "python -m serve.generate --target=demo/target" in capsys.readouterr().out
