"""Frozen records as absl flags, generated in both directions, and the conventions of every command line.

A record's fields are the only place where a flag's name, type, default and help stand. A field may carry
`metadata={"help": ..., "topic": ...}`; a topic heads the fields that follow it in `--help`. A nested record's fields
are its name, a dot and theirs (`--drafter.num_slots=15`), under a topic of its own.

The last occurrence of a flag wins, and a flagfile stands where it is named: put `--flagfile=...` first, so that the
flags behind it override it. An unknown flag, a leftover word and a bad value end the program with one sentence on
stderr and exit code 2.

Only entry points import this module, nothing in the package does. It reads no configuration file but absl's flagfiles
and knows no record of ours.
"""

import csv
import dataclasses
import io
import sys
import textwrap
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from absl import flags

USER_ERRORS = (
    ValueError,
    NotImplementedError,
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
"""What a user can mend: printed as one sentence. Anything else is a defect and keeps its traceback."""


@dataclass(frozen=True, kw_only=True)
class Codec:
    """How the values of one type are written on a command line; `word` stands for a value in `--help`."""

    parse: Callable[[str], Any]
    show: Callable[[Any], str]
    word: str


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One flag: a field of the record, or of a record nested in it. Without a default it must be given."""

    name: str
    codec: Codec
    is_switch: bool
    default: Any
    help: str
    topic: str


class RequiredType:
    """The default of a flag that must be given."""

    def __repr__(self) -> str:
        return "required"


REQUIRED = RequiredType()


def define_flags(record_type: type, flag_values: flags.FlagValues, prefix: str = "") -> None:
    """Defines one flag for each field of a frozen dataclass.

    Raises:
        ValueError: a field's type has no written form; accepted are bool, int, float, str, Literal, tuple[X, ...] of
            these, X | None, and dataclasses.
    """
    for setting in settings_of(record_type, prefix):
        default = None if setting.default is REQUIRED else setting.default
        parser = _Parser(setting.codec)
        flag_values[setting.name] = flags.Flag(
            parser, None, setting.name, default, setting.help or setting.name, boolean=setting.is_switch
        )


def record_from_flags(record_type: type, flag_values: flags.FlagValues, prefix: str = "") -> Any:
    """The record that parsed flags describe.

    Raises:
        ValueError: flags that must be given are missing; and whatever the record's own checks raise.
    """
    missing = [
        f"--{setting.name}"
        for setting in settings_of(record_type, prefix)
        if setting.default is REQUIRED and flag_values[setting.name].using_default_value
    ]
    if missing:
        raise ValueError(f"{' and '.join(missing)} must be given; --help lists every flag")
    values = {}
    for field, hint in _fields(record_type):
        name = prefix + field.name
        if is_record(hint):
            values[field.name] = record_from_flags(hint, flag_values, f"{name}.")
        else:
            values[field.name] = flag_values[name].value
    return record_type(**values)


def flags_from_record(record: Any, prefix: str = "") -> list[str]:
    """The lines of a flagfile that gives this record back, every field spelled out.

    Raises:
        ValueError: a value that would read back as another one, such as the text "none" where None is allowed.
    """
    lines = []
    for field, hint in _fields(type(record)):
        name, value = prefix + field.name, getattr(record, field.name)
        if is_record(hint):
            lines += flags_from_record(value, f"{name}.")
            continue
        codec = codec_of(hint, name)
        text = codec.show(value)
        if text != " ".join(text.splitlines()).strip() or codec.parse(text) != value:
            raise ValueError(f"--{name} can't hold {value!r}: as a line of a flagfile it would read back otherwise")
        lines.append(f"--{name}={text}")
    return lines


def run_main(
    record_type: type,
    run: Callable[[Any], int | None],
    *,
    program: str,
    examples: str = "",
    arguments: Sequence[str] | None = None,
) -> int:
    """Flags, then a record, then one call; returns the exit code, as in `sys.exit(run_main(...))`.

    Args:
        run: takes the record; what it returns is the exit code, None for 0.
        program: the module's name as in `python -m NAME`.
        examples: complete command lines, shown at the end of `--help`.
        arguments: the command line without the program; by default the process's own.
    """
    flag_values = flags.FlagValues()
    define_flags(record_type, flag_values)
    flags.DEFINE_bool("help", False, "show this text and exit", short_name="h", flag_values=flag_values)
    flags.DEFINE_bool("traceback", False, "show where an error arose", flag_values=flag_values)
    # Libraries (grain) keep flags of their own in absl's registry and insist that they have been parsed.
    flags.FLAGS.mark_as_parsed()
    try:
        _parse(flag_values, program, sys.argv[1:] if arguments is None else arguments)
        if flag_values["help"].value:
            print(help_text(record_type, program, examples))
            return 0
        return run(record_from_flags(record_type, flag_values)) or 0
    except (flags.Error, *USER_ERRORS) as error:
        if flag_values["traceback"].value:
            traceback.print_exc()
        print(f"{program}: {str(error).removeprefix('ERROR:: ')}", file=sys.stderr)
        return 2


def help_text(record_type: type, program: str, examples: str = "") -> str:
    """What `--help` prints: the record's docstring, its flags by topic, and the examples."""
    parts = [f"usage: python -m {program} [--flagfile=FILE] [--flag=value ...]", _summary(record_type)]
    topic = None
    for setting in settings_of(record_type):
        if setting.topic != topic:
            topic = setting.topic
            parts.append(topic)
        default = setting.default if setting.default is REQUIRED else f"default: {setting.codec.show(setting.default)}"
        head = f"  --{setting.name}={setting.codec.word}"
        text = textwrap.fill(
            f"{setting.help} ({default})".strip(), 100, initial_indent=" " * 6, subsequent_indent=" " * 6
        )
        parts[-1] += f"\n{head}\n{text}"
    parts.append("The last occurrence of a flag wins: put --flagfile first. --traceback shows where an error arose.")
    if examples:
        parts.append("Examples\n" + textwrap.indent(textwrap.dedent(examples).strip(), "  "))
    return "\n\n".join(parts)


def settings_of(
    record_type: type, prefix: str = "", default: Any = REQUIRED, topic: str = "Settings"
) -> Iterator[Setting]:
    """The flags of a record in the order of its fields; `default` is a record whose values stand in for the fields'."""
    for field, hint in _fields(record_type):
        name = prefix + field.name
        value = _default(field) if default is REQUIRED else getattr(default, field.name)
        topic = field.metadata.get("topic", topic)
        if is_record(hint):
            yield from settings_of(hint, f"{name}.", value, f"{name}: {_summary(hint)}")
            continue
        yield Setting(
            name=name,
            codec=codec_of(hint, name),
            is_switch=hint in (bool, bool | None),
            default=value,
            help=field.metadata.get("help", ""),
            topic=topic,
        )


def is_record(hint: Any) -> TypeGuard[type]:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def codec_of(hint: Any, name: str) -> Codec:
    """How values of the type `hint` are read and written; `name` is the flag's, for the error."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _SCALARS:
        return _SCALARS[hint]
    if origin is Literal:
        return _choice(arguments)
    if origin in (typing.Union, types.UnionType) and len(arguments) == 2 and types.NoneType in arguments:
        (inner,) = (argument for argument in arguments if argument is not types.NoneType)
        return _optional(codec_of(inner, name))
    if origin is tuple and len(arguments) == 2 and arguments[1] is ...:
        return _sequence(codec_of(arguments[0], name))
    raise ValueError(
        f"--{name} can't be a flag: its type is {hint}; accepted are bool, int, float, str, Literal, tuple[X, ...] of "
        "these, X | None, and nested dataclasses"
    )


def _scalar(parse: Callable[[str], Any], show: Callable[[Any], str], word: str, expected: str) -> Codec:
    def parse_or_explain(text: str) -> Any:
        try:
            return parse(text)
        except (ValueError, KeyError):
            raise ValueError(f"expected {expected}") from None

    return Codec(parse=parse_or_explain, show=show, word=word)


_SWITCH = {"true": True, "false": False}
_SCALARS = {
    bool: _scalar(_SWITCH.__getitem__, lambda value: str(value).lower(), "true|false", "true or false"),
    int: _scalar(int, str, "INT", "an integer"),
    float: _scalar(float, repr, "FLOAT", "a number"),
    str: Codec(parse=str, show=str, word="TEXT"),
}


def _choice(choices: tuple[Any, ...]) -> Codec:
    by_text = {str(choice): choice for choice in choices}
    return _scalar(by_text.__getitem__, str, "|".join(by_text), f"one of {', '.join(by_text)}")


def _optional(inner: Codec) -> Codec:
    return Codec(
        parse=lambda text: None if text == "none" else inner.parse(text),
        show=lambda value: "none" if value is None else inner.show(value),
        word=f"{inner.word}|none",
    )


def _sequence(inner: Codec) -> Codec:
    def parse(text: str) -> tuple[Any, ...]:
        return tuple(inner.parse(part) for row in csv.reader([text], skipinitialspace=True) for part in row)

    def show(values: tuple[Any, ...]) -> str:
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow(map(inner.show, values))
        return line.getvalue()

    return Codec(parse=parse, show=show, word=f"{inner.word},...")


class _Parser(flags.ArgumentParser):
    """Adapts a codec to absl, which also hands defaults, already values, to its parsers."""

    def __init__(self, codec: Codec):
        super().__init__()
        self.codec = codec

    def parse(self, argument: Any) -> Any:
        return self.codec.parse(argument) if isinstance(argument, str) else argument


def _parse(flag_values: flags.FlagValues, program: str, arguments: Sequence[str]) -> None:
    """Parses flags and flagfiles; refuses leftover words, and absl's way of letting unknown flags pass."""
    words = flag_values.read_flags_from_files(list(arguments), force_gnu=False)
    if any(word.lstrip("-").partition("=")[0] == "undefok" for word in words if word.startswith("-")):
        raise ValueError("--undefok is not accepted: an unknown flag is an error; remove it")
    leftover = flag_values([program, *words])[1:]
    if leftover:
        raise ValueError(
            f"the word {leftover[0]!r} belongs to no flag; write every setting as --name=value, see --help"
        )


def _fields(record_type: type) -> Iterator[tuple[dataclasses.Field, Any]]:
    if not is_record(record_type):
        raise ValueError(f"flags are generated from a dataclass; got {record_type}")
    hints = typing.get_type_hints(record_type)
    return ((field, hints[field.name]) for field in dataclasses.fields(record_type) if field.init)


def _default(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return REQUIRED if field.default_factory is dataclasses.MISSING else field.default_factory()


def _summary(record_type: type) -> str:
    return (record_type.__doc__ or record_type.__name__).strip().splitlines()[0]
