"""One streamed reply: the text that the target alone would write, and numbers that fit it."""

import io
import re

import pytest

from serve import generate, workload
from serve.engine import Block, Reply, Times
from serve.stream import TextStream
from tests.serve.conftest import CONTEXT, END

PROMPT = "round and round it goes"


def arguments(folders, **changes) -> list[str]:
    values = {"target": folders / "target", "drafter": folders / "hf", "prompt": PROMPT, "max_new_tokens": 20}
    return [f"--{name}={value}" for name, value in (values | changes).items()]


def answer(folders, capsys, **changes) -> tuple[str, str]:
    """Standard output and error of a run that succeeds."""
    assert generate.main(arguments(folders, **changes)) == 0
    printed = capsys.readouterr()
    return printed.out, printed.err


def test_the_reply_is_what_plain_decoding_writes(folders, capsys):
    plain, plain_numbers = answer(folders, capsys, method="ar", temperature=1)
    drafted, numbers = answer(folders, capsys, temperature=1)
    assert drafted == plain != "\n" and "\x1b" not in drafted
    assert "tau 1.00 tokens per block" in plain_numbers
    emitted = [int(n) for n in re.search(r"tokens per block: ([\d ]+)", numbers).group(1).split()]
    tau, tokens, blocks = re.search(r"tau ([\d.]+) .*, (\d+) tokens in (\d+) blocks", numbers).groups()
    assert (int(blocks), int(tokens)) == (len(emitted), 1 + sum(emitted))
    assert float(tau) == pytest.approx(sum(emitted) / len(emitted), abs=0.005)
    assert 0 < len(plain.split()) <= 1 + sum(emitted) and END not in plain  # special tokens are no text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_tokens_of_each_block_and_no_other_output_does(folders):
    config = generate.GenerateConfig(
        target=str(folders / "target"), drafter=str(folders / "hf"), prompt=PROMPT, max_new_tokens=20
    )
    engine, request, text = generate.prepare(config)
    shown, piped = Terminal(), io.StringIO()
    reply = generate.stream(engine, request, text, shown)
    text = TextStream(workload.load_tokenizer(folders / "target"))
    assert generate.stream(engine, request, text, piped).token_ids == reply.token_ids
    counts = re.findall(r"\[(\d+)\]", shown.getvalue())
    assert [int(count) for count in counts] == [block.emitted for block in reply.blocks]
    assert re.sub(r"\x1b\[2m\[\d+\]\x1b\[0m", "", shown.getvalue()) == piped.getvalue()


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
        ({"temperature": -1}, "temperature must be finite and not negative; got -1.0"),
        ({"walk": "random"}, "random"),
        ({"target": "nowhere"}, "nowhere"),
        ({"prompt": "so " * 100}, f"shorter than the context limit of {CONTEXT} tokens; got 102"),
    ],
)
def test_bad_input_ends_with_one_sentence_and_code_two(folders, changes, sentence, capsys):
    assert generate.main(arguments(folders, **changes)) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err and printed.out == "" and len(printed.err.strip().splitlines()) == 1


def test_help_shows_examples(capsys):
    assert generate.main(["--help"]) == 0
    assert "python -m serve.generate --target=demo/target" in capsys.readouterr().out
