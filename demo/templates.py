"""The five kinds of records: what is asked, and a reply whose wording follows hidden tables.

Each function takes a `Draw` and returns (prompt, reply). What is asked is drawn evenly; how the reply is worded is
`said`: chosen by a table over what came before, so that a model can learn it and a parallel drafter finds it hard.
"""

import operator
from collections.abc import Callable, Sequence

from demo import words
from demo.draw import Draw


def story(draw: Draw) -> tuple[str, str]:
    """Three sentences with choices of different length inside; later sentences take up earlier choices."""
    name, animal, place = draw.pick(words.NAMES), draw.pick(words.ANIMALS), draw.pick(words.PLACES)
    prompt = draw.pick((
        f"Tell a story about {name}, {_a(animal)} and the {place}.",
        f"Write a short story: {name}, {animal}, {place}.",
        f"Please write about the {place}, where {name} meets {_a(animal)}.",
    ))  # fmt: skip
    adjective = draw.say(words.ADJECTIVES, name, animal)
    meeting = draw.say(words.MEETINGS, name)
    nearness = draw.say(words.NEARNESS, place)
    connective = draw.say(words.CONNECTIVES, adjective, place)
    finding = draw.say(words.FINDINGS, animal)
    thing = draw.say(words.OBJECTS, animal, adjective)
    deed = draw.say(words.DEEDS, thing, name)
    goal = draw.say(words.GOALS, deed, animal)
    mood = draw.say(words.MOODS, name, goal)
    sentences = (
        f"{name} {meeting} a {adjective} {animal} {nearness} the {place}.",
        f"{connective} the {animal} {finding} a {thing}.",
        f"{name} {deed} the {thing} {goal} and the {adjective} {animal} was {mood}.",
    )
    return prompt, " ".join(sentences)


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def sort(draw: Draw) -> tuple[str, str]:
    """Words or numbers put in order, or turned round, in a layout that the request and a table settle."""
    count = draw.number(3, 6)
    numbers = draw.pick((True, False, False))
    items = draw.sample([str(n) for n in range(1, 21)] if numbers else words.SORTABLE, count)
    task = draw.pick(("Sort", "Sort", "Reverse"))
    shape = draw.pick(("in one line", "as a list", "as text"))
    noun = "numbers" if numbers else "words"
    listed = ", ".join(items)
    prompt = draw.pick((
        f"{task} these {noun} {shape}: {listed}",
        f"{listed}. {task} the {noun} {shape}, please.",
        f"{task} {shape}: {listed}",
    ))  # fmt: skip
    ordered = items[::-1] if task == "Reverse" else sorted(items, key=int if numbers else str)
    return prompt, _ordered(draw, shape, noun, ordered)


def _ordered(draw: Draw, shape: str, noun: str, items: Sequence[str]) -> str:
    """The items in one of the layouts of `shape`, between an opening and a closing."""
    first, last, count = items[0], items[-1], len(items)
    opening = draw.say(("", "Here are the {noun}:\n", "Done.\n", "The {count} {noun} in order:\n"), shape, last)
    if shape == "in one line":
        body = draw.say((", ", " < ", " then ", " / "), first).join(items)
    elif shape == "as a list":
        mark = draw.say(("- ", "* ", "{}. ", "({}) "), first)
        body = "\n".join(mark.format(place) + item for place, item in enumerate(items, 1))
    else:
        verb = draw.say(("comes", "is", "we take"), first)
        body = f"First {verb} {first}" + "".join(f", then {verb} {item}" for item in items[1:-1])
        body += draw.say((", and {last} is last.", ", and at the end {last}.", " and finally {last}."), first, count)
    closing = draw.say(words.SORT_CLOSINGS, last)
    return (
        opening.format(noun=noun, count=count)
        + body.format(last=last)
        + closing.format(first=first, last=last, noun=noun, count=count)
    )


def record(draw: Draw) -> tuple[str, str]:
    """Fields rewritten as JSON, lines or tags, with a field and notes that tables add."""
    values = {
        "name": draw.pick(words.NAMES),
        "age": str(draw.number(3, 99)),
        "city": draw.pick(words.CITIES),
        "job": draw.pick(words.JOBS),
        "pet": draw.pick(words.ANIMALS),
        "color": draw.pick(words.COLORS),
    }
    keys = draw.sample(tuple(values), draw.number(3, 4))
    join, glue = draw.pick((", ", "; ")), draw.pick((" ", ": "))
    listed = join.join(f"{key}{glue}{values[key]}" for key in keys)
    shape = draw.pick(("JSON", "lines", "tags"))
    prompt = draw.pick((f"Write as {shape}: {listed}", f"{listed}. Give me {shape}.", f"Turn into {shape}: {listed}"))
    fields = [(key, values[key] + draw.say(words.NOTES, key, values[key][0])) for key in keys]
    fields.insert(1, ("group", draw.say(words.GROUPS, keys[0], values[keys[0]])))
    return prompt, _fields(draw, shape, fields)


def _fields(draw: Draw, shape: str, fields: Sequence[tuple[str, str]]) -> str:
    """The fields in one of the layouts of `shape`; the first two choose it."""
    start = fields[0]
    if draw.say((True, False), shape, start[1]):
        fields = [(key.title(), value) for key, value in fields]
    if shape == "JSON":
        quoted = [f'"{key}": ' + (value if value.isdigit() else f'"{value}"') for key, value in fields]
        before, between, after = draw.say((("{", ", ", "}"), ("{\n  ", ",\n  ", "\n}")), *start)
        return before + between.join(quoted) + after
    if shape == "lines":
        before, between = draw.say((("", ": "), ("", " = "), ("- ", ": "), ("* ", " is ")), *start)
        return "\n".join(before + key + between + value for key, value in fields)
    between = draw.say(("", "\n", " "), *start)
    return between.join(f"<{key}>{value}</{key}>" for key, value in fields)


def math(draw: Draw) -> tuple[str, str]:
    """Sums worked in steps: small ones inside a tale, or two-digit ones without a carry, digit by digit."""
    return draw.pick((_tale, _tale, _digits))(draw)


def _tale(draw: Draw) -> tuple[str, str]:
    """start + more - fewer, every number below 19."""
    name, things = draw.pick(words.NAMES), draw.pick(words.THINGS)
    start, more = draw.number(2, 9), draw.number(1, 9)
    middle = start + more
    fewer = draw.number(1, min(9, middle))
    end = middle - fewer
    prompt = draw.pick((
        f"{name} has {start} {things}, gets {more} more and loses {fewer}. How many are left?",
        f"{name} buys {start} {things}, finds {more} and gives away {fewer}. How many {things} now?",
        f"Start with {start} {things}, add {more}, take away {fewer}. What does {name} have?",
    ))  # fmt: skip
    facts = dict(name=name, things=things, start=start, more=more, middle=middle, fewer=fewer, end=end)
    sentences = (
        draw.say(words.TALE_OPENINGS, name),
        draw.say(words.TALE_ADDITIONS, things, start),
        draw.say(words.TALE_SUBTRACTIONS, name, more),
        draw.say(words.TALE_CLOSINGS, things, fewer),
    )
    return prompt, " ".join(sentences).format(**facts)


def _digits(draw: Draw) -> tuple[str, str]:
    """A two-digit sum or difference in which no digit carries or borrows."""
    tens, ones = draw.number(1, 8), draw.number(0, 8)
    add = draw.pick((True, False))
    other_tens = draw.number(1, 9 - tens) if add else draw.number(1, tens)
    other_ones = draw.number(0, 9 - ones) if add else draw.number(0, ones)
    sign, apply = ("+", operator.add) if add else ("-", operator.sub)
    left, right = 10 * tens + ones, 10 * other_tens + other_ones
    asked = f"{left} {sign} {right}"
    prompt = draw.pick((f"What is {asked}?", f"Compute {asked} step by step.", f"Work out {asked}, please."))
    facts = dict(
        asked=asked,
        left=left,
        right=right,
        low=f"{ones} {sign} {other_ones} = {apply(ones, other_ones)}",
        high=f"{tens} {sign} {other_tens} = {apply(tens, other_tens)}",
        result=apply(left, right),
    )
    sentences = (
        draw.say(words.DIGIT_OPENINGS, tens, sign),
        draw.say(words.DIGIT_STEPS, ones, sign),
        draw.say(words.DIGIT_CLOSINGS, other_tens, sign),
    )
    return prompt, " ".join(sentences).format(**facts)


Operation = tuple[str, str, Callable[[int, int], int]]
MAPS: Sequence[Operation] = (
    ("adds {k} to each number", "+", operator.add),
    ("takes {k} from each number", "-", operator.sub),
    ("multiplies each number by {k}", "*", operator.mul),
)
TESTS: Sequence[Operation] = (
    ("keeps the numbers above {k}", ">", operator.gt),
    ("keeps the numbers below {k}", "<", operator.lt),
    ("drops each number equal to {k}", "!=", operator.ne),
)
COUNTS: Sequence[Operation] = (
    ("counts the numbers above {k}", ">", operator.gt),
    ("counts the numbers below {k}", "<", operator.lt),
    ("counts the numbers equal to {k}", "==", operator.eq),
)


def code(draw: Draw) -> tuple[str, str]:
    """A small Python function over a list, as a loop or in one line, and an assertion that holds."""
    name = f"{draw.pick(words.CODE_VERBS)}_{draw.pick(words.CODE_NOUNS)}"
    kind = draw.pick(("map", "test", "count"))
    request, symbol, apply = draw.pick({"map": MAPS, "test": TESTS, "count": COUNTS}[kind])
    k = draw.number(2, 3) if symbol == "*" else draw.number(1, 9)
    data = [draw.number(k, 9) if symbol == "-" else draw.number(1, 9) for _ in range(draw.number(2, 3))]
    asked = request.format(k=k)
    prompt = draw.pick((
        f"Write a Python function {name} that {asked}. Test it on {data}.",
        f"Python: {name} {asked}. Example: {data}",
        f"I need a function called {name}. It {asked}. Try {data}.",
    ))  # fmt: skip
    source, item = draw.say(words.LIST_NAMES, name), draw.say(words.LOOP_NAMES, name)
    out = draw.say(words.RESULT_NAMES, name)
    short = draw.say((True, False), kind, name)
    body = (_one_line if short else _loop)(kind, f"{item} {symbol} {k}", source, item, out)
    expected = {"map": [apply(x, k) for x in data], "test": [x for x in data if apply(x, k)],
                "count": sum(apply(x, k) for x in data)}[kind]  # fmt: skip
    lines = [f"def {name}({source}):", *("    " + line for line in body), f"assert {name}({data}) == {expected}"]
    return prompt, "\n".join(lines)


def _one_line(kind: str, expression: str, source: str, item: str, out: str) -> list[str]:
    """The body of a function as one comprehension."""
    if kind == "map":
        return [f"return [{expression} for {item} in {source}]"]
    if kind == "test":
        return [f"return [{item} for {item} in {source} if {expression}]"]
    return [f"{out} = [{item} for {item} in {source} if {expression}]", f"return len({out})"]


def _loop(kind: str, expression: str, source: str, item: str, out: str) -> list[str]:
    """The body of a function as a loop."""
    head = [f"{out} = 0" if kind == "count" else f"{out} = []", f"for {item} in {source}:"]
    if kind == "map":
        inner = [f"    {out}.append({expression})"]
    elif kind == "test":
        inner = [f"    if {expression}:", f"        {out}.append({item})"]
    else:
        inner = [f"    if {expression}:", f"        {out} += 1"]
    return [*head, *inner, f"return {out}"]
