"""The command line's conventions: records to flags and back, and one sentence for whatever a user can mend."""

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Literal

import pytest
from absl import flags

from lilicorr_jax.flags import define_flags, flags_from_record, record_from_flags, run_main


@dataclass(frozen=True, kw_only=True)
class Walk:
    """How a path is chosen."""

    kind: Literal["greedy", "exact", "sampled"] = "greedy"
    temperature: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """Trains something."""

    target: str = field(metadata={"help": "folder of the target", "topic": "Data"})
    layers: tuple[int, ...] = (1, 3)
    categories: tuple[str, ...] = ()
    learning_rate: float = field(default=6e-4, metadata={"help": "peak of the schedule", "topic": "Optimizer"})
    steps: int = 100
    seed: int | None = None
    note: str | None = None
    block: Literal[4, 16] = 16
    resume: bool = True
    walk: Walk = Walk(temperature=0.5)

    def __post_init__(self):
        if self.steps < 0:
            raise ValueError(f"steps must be at least 0; got {self.steps}.")


def parse(*arguments: str) -> Run:
    flag_values = flags.FlagValues()
    define_flags(Run, flag_values)
    flag_values(["test", *arguments])
    return record_from_flags(Run, flag_values)


def main(*arguments: str, run=lambda record: None) -> int:
    return run_main(Run, run, program="train.main", examples="python -m train.main --target=here", arguments=arguments)


def test_defaults_are_those_of_the_record_and_of_the_nested_default():
    assert parse("--target=here") == Run(target="here")
    assert parse("--target=here").walk.temperature == 0.5


@pytest.mark.parametrize(
    "argument, name, value",
    [
        ("--layers=0,2,11", "layers", (0, 2, 11)),
        ("--layers=", "layers", ()),
        ('--categories=code, "maths, hard"', "categories", ("code", "maths, hard")),
        ("--learning_rate=1e-3", "learning_rate", 0.001),
        ("--learning_rate=1", "learning_rate", 1.0),
        ("--seed=7", "seed", 7),
        ("--seed=none", "seed", None),
        ("--note=", "note", ""),
        ("--block=4", "block", 4),
        ("--noresume", "resume", False),
        ("--resume=false", "resume", False),
        ("--walk.kind=exact", "walk", Walk(kind="exact", temperature=0.5)),
    ],
)
def test_each_type_is_read(argument, name, value):
    got = getattr(parse("--target=here", argument), name)
    assert got == value and type(got) is type(value)


RECORDS = [
    Run(target="here"),
    Run(target="a folder, with = and # in it", layers=(), categories=("", "b,c", 'say "hi"'), seed=0, resume=False),
    Run(
        target="", learning_rate=1 / 3, steps=0, note="two words", block=4, walk=Walk(kind="sampled", temperature=1e-30)
    ),
]


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_written_as_a_flagfile_is_read_back_equal(record, tmp_path):
    flagfile = tmp_path / "run.flags"
    flagfile.write_text("# how this run was made\n\n" + "\n".join(flags_from_record(record)) + "\n")
    seen = []
    assert main(f"--flagfile={flagfile}", run=seen.append) == 0
    assert seen == [record]


def test_a_flagfile_names_every_field_once():
    names = [line.partition("=")[0] for line in flags_from_record(RECORDS[0])]
    assert names == [
        *("--target", "--layers", "--categories", "--learning_rate", "--steps", "--seed", "--note", "--block"),
        *("--resume", "--walk.kind", "--walk.temperature"),
    ]


@pytest.mark.parametrize("text", ["none", " padded", "two\nlines"])
def test_a_value_that_would_read_back_otherwise_is_not_written(text):
    with pytest.raises(ValueError, match="note can't hold " + repr(text).replace("\\", "\\\\")):
        flags_from_record(Run(target="here", note=text))


def test_the_last_occurrence_wins_so_a_flagfile_placed_last_overrides_the_command_line(tmp_path):
    flagfile = tmp_path / "run.flags"
    flagfile.write_text("--target=here\n--steps=5\n")
    seen = []
    assert main(f"--flagfile={flagfile}", "--steps=9", run=seen.append) == 0
    assert main("--steps=9", f"--flagfile={flagfile}", run=seen.append) == 0
    assert [record.steps for record in seen] == [9, 5]


@pytest.mark.parametrize(
    "arguments, offence",
    [
        ((), "--target must be given"),
        (("--target=here", "--stepps=3"), "stepps"),
        (("--target=here", "--step=3"), "'step'"),
        (("--target=here", "steps=3"), "'steps=3'"),
        (("--target=here", "--resume", "false"), "'false'"),
        (("--target=here", "--undefok=stepps", "--stepps=3"), "--undefok"),
        (("--target=here", "--steps=many"), "--steps=many: expected an integer"),
        (("--target=here", "--steps=1.5"), "--steps=1.5: expected an integer"),
        (("--target=here", "--learning_rate=fast"), "--learning_rate=fast: expected a number"),
        (("--target=here", "--walk.kind=best"), "--walk.kind=best: expected one of greedy, exact, sampled"),
        (("--target=here", "--resume=yes"), "--resume=yes: expected true or false"),
        (("--target=here", "--layers=1,x"), "--layers=1,x: expected an integer"),
        (("--target=here", "--steps=-1"), "steps must be at least 0; got -1."),
        (("--flagfile=nowhere.flags",), "nowhere.flags"),
    ],
)
def test_a_bad_command_line_is_one_sentence_and_exit_code_2(arguments, offence, capsys):
    assert main(*arguments, run=lambda record: pytest.fail("it ran")) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("train.main: ") and printed.err.count("\n") == 1
    assert offence in printed.err


@pytest.mark.parametrize("error", [ValueError, NotImplementedError, FileNotFoundError])
def test_an_error_of_the_run_that_a_user_can_mend_is_printed_without_traceback(error, capsys):
    def run(record):
        raise error(f"no folder {record.target}; make it")

    assert main("--target=here", run=run) == 2
    assert capsys.readouterr().err == "train.main: no folder here; make it\n"
    assert main("--target=here", "--traceback", run=run) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_defect_keeps_its_traceback():
    def run(record):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        main("--target=here", run=run)


def test_what_the_run_returns_is_the_exit_code():
    assert main("--target=here", run=lambda record: 3) == 3


def test_help_groups_the_flags_by_topic_and_ends_with_the_examples(capsys):
    assert main("--help", run=lambda record: pytest.fail("it ran")) == 0
    text = capsys.readouterr().out
    landmarks = [
        "Trains something.",
        "\nData\n  --target=TEXT\n      folder of the target (required)",
        "  --layers=INT,...",
        "\nOptimizer\n  --learning_rate=FLOAT\n      peak of the schedule (default: 0.0006)",
        "  --seed=INT|none",
        "\nwalk: How a path is chosen.\n  --walk.kind=greedy|exact|sampled",
        "(default: 0.5)",
        "\nExamples\n  python -m train.main --target=here",
    ]
    places = [text.find(landmark) for landmark in landmarks]
    assert -1 not in places and places == sorted(places)


def test_a_type_without_a_written_form_is_refused():
    @dataclass(frozen=True, kw_only=True)
    class Odd:
        table: dict[str, int]

    with pytest.raises(ValueError, match=r"--table can't be a flag: its type is dict\[str, int\]"):
        define_flags(Odd, flags.FlagValues())
    with pytest.raises(ValueError, match="int"):
        define_flags(int, flags.FlagValues())


def test_a_process_exits_with_code_2_and_no_traceback(tmp_path):
    script = tmp_path / "entry.py"
    script.write_text(
        "import sys\nfrom lilicorr_jax.config import RopeConfig\nfrom lilicorr_jax.flags import run_main\n"
        "sys.exit(run_main(RopeConfig, print, program='entry'))\n"
    )
    done = subprocess.run([sys.executable, script, "--theta=-1"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "entry: RopeConfig.theta must be positive; got -1.0.\n"
