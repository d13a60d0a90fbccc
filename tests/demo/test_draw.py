"""One record's source of chance: repeatable, even, and faithful to its tables but for the noise."""

import itertools
from collections import Counter

import pytest

from demo.draw import Draw


def test_the_same_key_gives_the_same_draws_and_another_key_others():
    draws = [[Draw(key).number(0, 10**9) for _ in range(3)] for key in ("a", "a", "b")]
    assert draws[0] == draws[1] != draws[2]


def test_draws_are_pinned_so_that_shipped_files_can_be_made_again():
    draw = Draw("pinned", noise=0.5)
    seen = [draw.number(1, 6) for _ in range(8)] + draw.sample("abcdef", 3) + [draw.say("xyz", "why") for _ in range(4)]
    assert seen == [3, 6, 4, 5, 4, 2, 1, 4, "b", "e", "c", "x", "x", "y", "x"]


def test_numbers_reach_both_ends_and_are_even():
    draw = Draw("ends")
    counts = Counter(draw.number(3, 6) for _ in range(4000))
    assert sorted(counts) == [3, 4, 5, 6]
    assert all(900 < count < 1100 for count in counts.values())


def test_a_sample_has_no_item_twice_and_every_order_occurs():
    draw = Draw("sample")
    orders = Counter(tuple(draw.sample("abc", 3)) for _ in range(600))
    assert set(orders) == set(itertools.permutations("abc"))


@pytest.mark.parametrize("noise", [0.0, 0.15, 0.6])
def test_a_wording_ignores_its_table_in_the_share_of_noise(noise):
    draw, options = Draw("noise", noise=noise), ("a", "b", "c", "d")
    expected = Draw("other", noise=0.0).say(options, "fox", 3)
    share = sum(draw.say(options, "fox", 3) == expected for _ in range(4000)) / 4000
    assert share == pytest.approx(1 - noise + noise / 4, abs=0.025)  # noise may hit the table's option by chance


def test_a_table_depends_on_every_reason_and_on_its_options():
    draw, options = Draw("table", noise=0.0), tuple(range(100))
    said = {draw.say(options, *reasons) for reasons in (("a", "b"), ("b", "a"), ("a",), ("a", "b", "c"))}
    assert len(said) == 4
    assert draw.say(tuple(range(1, 101)), "a", "b") != draw.say(options, "a", "b") + 1


def test_the_table_is_never_the_chance_of_the_record():
    said = {Draw(str(key), noise=0.0).say(tuple(range(100)), "fox") for key in range(20)}
    assert len(said) == 1
