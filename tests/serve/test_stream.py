"""Streamed pieces against the decoded whole, for every way of cutting it into blocks."""

import pytest

from demo import tokenizer as demo_tokenizer
from serve import stream, workload

TEXTS = {
    "ascii": "a small text.\n  Indented, with  two spaces ",
    "hangul": "한국어 글 abc",
    "emoji": "smile 😀😀 and ünïcödé",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Byte-level: any character outside ASCII takes several tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    demo_tokenizer.write(demo_tokenizer.train(["a small text with ascii letters only"]), folder, context=512)
    return workload.load_tokenizer(folder)


def pieces(tokenizer, ids, width: int, first: int = 0) -> list[str]:
    """A block of `first` tokens, then blocks of `width`, then the flush."""
    text = stream.TextStream(tokenizer)
    cuts = [0, *range(first or width, len(ids), width), len(ids)]
    return [text.push(ids[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)] + [text.flush()]


@pytest.mark.parametrize("name", TEXTS)
def test_pieces_join_to_the_text_wherever_blocks_cut_it(tokenizer, name):
    ids = tokenizer.encode(TEXTS[name], add_special_tokens=False)
    for width in range(1, len(ids) + 1):
        for first in range(width):
            parts = pieces(tokenizer, ids, width, first)
            assert "".join(parts) == TEXTS[name]
            assert not any(stream.REPLACEMENT in part for part in parts) and parts[-1] == ""


def test_text_is_handed_out_as_soon_as_its_characters_are_complete(tokenizer):
    """Four tokens of one emoji: nothing until the last; what stands before it in a block doesn't wait."""
    ids = tokenizer.encode("ab😀", add_special_tokens=False)
    assert len(ids) == 6
    assert pieces(tokenizer, ids, 1) == ["a", "b", "", "", "", "😀", ""]
    assert pieces(tokenizer, ids, 3) == ["ab", "😀", ""]


def test_a_reply_that_stops_inside_a_character_ends_with_the_replacement_sign(tokenizer):
    ids = tokenizer.encode("ab😀", add_special_tokens=False)[:-1]
    assert pieces(tokenizer, ids, 2) == ["ab", "", "", stream.REPLACEMENT]
    assert "".join(pieces(tokenizer, ids, 2)) == tokenizer.decode(ids)


def test_bytes_that_never_become_a_character_are_shown_as_the_whole_decode_shows_them(tokenizer):
    """A lone continuation byte, twice, then a letter."""
    tail = tokenizer.encode("😀", add_special_tokens=False)[-1]
    ids = [tail, tail, *tokenizer.encode("a", add_special_tokens=False)]
    for width in (1, 2, 3):
        assert "".join(pieces(tokenizer, ids, width)) == tokenizer.decode(ids) == 2 * stream.REPLACEMENT + "a"


def test_special_tokens_are_left_out(tokenizer):
    (end,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    ids = tokenizer.encode("text", add_special_tokens=False)
    assert "".join(pieces(tokenizer, [*ids, end], 1)) == "text"


def test_a_long_reply_keeps_only_its_last_blocks(tokenizer):
    decoded = []

    class Counting:
        def decode(self, ids, **settings):
            decoded.append(len(ids))
            return tokenizer.decode(ids, **settings)

    text = stream.TextStream(Counting())
    ids = tokenizer.encode("a small text " * 100, add_special_tokens=False)
    joined = "".join(text.push(ids[i : i + 4]) for i in range(0, len(ids), 4))
    assert joined == "a small text " * 100
    assert max(decoded) <= 8
