"""The corpus is what its text says: right sums, right orders, code that runs, splits that share nothing."""

import hashlib
import itertools
import json
import re
from collections import Counter, defaultdict

import pytest

from demo import corpus

COUNT = 1000
NUMBER = re.compile(r"\d+")


@pytest.fixture(scope="module")
def by_category() -> dict[str, list[corpus.Record]]:
    groups = defaultdict(list)
    for record in itertools.islice(corpus.records("pretrain", seed=5), COUNT):
        groups[record.category].append(record)
    return groups


@pytest.mark.parametrize(
    ("split", "digest"), [("pretrain", "539bee7e247f"), ("replies", "855cf5808b48"), ("heldout", "42f748e63de4")]
)
def test_records_follow_from_the_seed_as_when_the_shipped_files_were_made(split, digest):
    made = hashlib.sha256()
    for record in itertools.islice(corpus.records(split, seed=0), 100):
        made.update(repr((record.category, record.prompt, record.reply)).encode())
    assert made.hexdigest()[:12] == digest


def test_another_seed_gives_other_records():
    first, second = (next(corpus.records("replies", seed=seed)) for seed in (0, 1))
    assert first != second


def test_splits_share_no_prompt_whatever_the_seed():
    prompts = {
        split: {record.prompt for record in itertools.islice(corpus.records(split, seed=seed), 100)}
        for seed, split in enumerate(corpus.SPLITS)
    }
    for one, other in itertools.combinations(prompts, 2):
        assert not prompts[one] & prompts[other], (one, other)


def test_distinct_gives_the_asked_counts_and_no_prompt_twice():
    asked = {"story": 10, "math": 20}
    records = corpus.distinct("heldout", seed=0, per_category=asked)
    assert Counter(record.category for record in records) == asked
    assert len({record.prompt for record in records}) == 30


def test_noise_changes_wordings_but_no_prompt():
    noisy, plain = (
        list(itertools.islice(corpus.records("pretrain", seed=2, noise=noise), 100)) for noise in (0.5, 0.0)
    )
    assert [record.prompt for record in noisy] == [record.prompt for record in plain]
    assert sum(a.reply != b.reply for a, b in zip(noisy, plain, strict=True)) > 50


def test_categories_come_in_their_shares(by_category):
    for category in corpus.CATEGORIES:
        share = corpus.SHARES.count(category) / len(corpus.SHARES)
        assert len(by_category[category]) / COUNT == pytest.approx(share, abs=0.03)


def test_an_unknown_split_is_refused_by_name():
    with pytest.raises(ValueError, match="'test'.*pretrain, replies, heldout"):
        next(corpus.records("test", seed=0))


def test_every_equation_is_right_and_the_last_number_is_the_answer(by_category):
    for record in by_category["math"]:
        equations = re.findall(r"(\d+) ([+-]) (\d+) = (\d+)", record.reply)
        assert len(equations) >= 2, record
        for left, sign, right, result in equations:
            assert int(left) + (int(right) if sign == "+" else -int(right)) == int(result), record
        asked = list(map(int, NUMBER.findall(record.prompt)))
        answer = asked[0] + asked[1] - asked[2] if len(asked) == 3 else asked[0] + asked[1]
        if f"{asked[0]} - {asked[1]}" in record.prompt:
            answer = asked[0] - asked[1]
        assert int(NUMBER.findall(record.reply)[-1]) == answer, record


def test_sums_stay_within_what_a_small_model_can_learn(by_category):
    for record in by_category["math"]:
        asked = list(map(int, NUMBER.findall(record.prompt)))
        if len(asked) == 3:
            assert max(asked[0] + asked[1], *asked) < 19 and asked[0] + asked[1] >= asked[2]
            continue
        digits = [(number // 10, number % 10) for number in asked]
        for left, right in zip(*digits, strict=True):
            assert 0 <= (left - right if " - " in record.prompt else left + right) <= 9, record


def test_words_and_numbers_come_back_in_the_order_asked_for(by_category):
    tasks = Counter()
    for record in by_category["sort"]:
        prompt = record.prompt.partition(": ")[2] or record.prompt.partition(".")[0]
        items = prompt.split(", ")
        if "Reverse" in record.prompt:
            expected = items[::-1]
        else:
            expected = sorted(items, key=lambda item: int(item) if item.isdigit() else item)
        body = record.reply
        for frame in (
            r"^Here are.*\n",
            r"^Done\.\n",
            r"^The \d.*\n",
            r"\n(The first|From|That makes).*$",
            r"(?m)^\(?\d+[.)] ",
        ):
            body = re.sub(frame, "", body)
        found = [item for item in re.findall(r"[a-z]+|\d+", body) if item in items]
        assert found == expected, record
        tasks["Reverse" in record.prompt] += 1
    assert min(tasks.values()) > 50


def call_of(source: str, data: list[int]):
    """What the function of a reply, which also runs its assertion, gives for other data."""
    names = {}
    exec(compile(source, "reply", "exec"), names)
    (name,) = re.findall(r"def (\w+)\(", source)
    return names[name](data)


def wanted(prompt: str, data: list[int]):
    """What the words of a prompt ask for, read by hand."""
    k = int(NUMBER.findall(prompt)[0])
    return {
        "adds": lambda: [x + k for x in data],
        "takes": lambda: [x - k for x in data],
        "multiplies": lambda: [x * k for x in data],
        "keeps": lambda: [x for x in data if (x > k if "above" in prompt else x < k)],
        "drops": lambda: [x for x in data if x != k],
        "counts": lambda: len(
            [x for x in data if (x > k if "above" in prompt else x < k if "below" in prompt else x == k)]
        ),
    }[next(verb for verb in ("adds", "takes", "multiplies", "keeps", "drops", "counts") if f" {verb} " in prompt)]()


def test_code_runs_holds_its_own_assertion_and_does_what_was_asked(by_category):
    forms = Counter()
    for record in by_category["code"]:
        data = [7, 0, 3, 9, 1, 3, 5, 2, 8, 6, 4]
        assert call_of(record.reply, data) == wanted(record.prompt, data), record
        example = re.search(r"\[[\d, ]+\]", record.prompt).group()
        name = re.search(r"\w+_\w+", record.prompt).group()
        assert f"assert {name}({example}) == " in record.reply
        forms["append" in record.reply or "+=" in record.reply] += 1
    assert min(forms.values()) > 50


def test_an_assertion_with_a_wrong_value_would_be_noticed(by_category):
    wrong = re.sub(r"== .*$", "== 99", by_category["code"][0].reply)
    with pytest.raises(AssertionError):
        call_of(wrong, [1])


def test_records_keep_every_field_in_order_and_json_parses(by_category):
    for record in by_category["record"]:
        listed = re.sub(r"^.*(JSON|lines|tags): |\. Give me .*", "", record.prompt)
        fields = [re.split(r": | ", part, maxsplit=1) for part in re.split("[;,] ", listed)]
        if "JSON" in record.prompt:
            found = list(json.loads(record.reply).items())
        elif "tags" in record.prompt:
            found = re.findall(r"<(\w+)>([^<]*)</\1>", record.reply)
        else:
            found = [
                re.fullmatch(r"[-*]? ?(\w+)(?:: | = | is )(.*)", line).groups() for line in record.reply.split("\n")
            ]
        assert found.pop(1)[0].lower() == "group"
        assert [key.lower() for key, _ in found] == [key for key, _ in fields], record
        for (_, value), (_, given) in zip(found, fields, strict=True):
            assert (
                str(value).removesuffix(" (new)").removesuffix(" (to check)").removesuffix(" (same as before)") == given
            )


def test_stories_take_up_what_was_asked_and_what_was_chosen(by_category):
    for record in by_category["story"]:
        first, second, third = record.reply.removesuffix(".").split(". ")
        name, adjective, animal = re.match(r"(\w+) .*? a (.*) (\w+) (?:near|by|not|right|at) ", first).groups()
        for word in (name, animal, first.rpartition("the ")[2]):
            assert word in record.prompt, record
        thing = second.rpartition(" a ")[2]
        assert third.startswith(name) and f"the {thing} " in third and f"the {adjective} {animal} was" in third, record
