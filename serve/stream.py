"""Text that grows block by block without broken characters.

A block may end in the middle of a character, since byte-level tokens cut where they like. It knows no engine.
"""

from collections.abc import Sequence

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character, or not yet


class TextStream:
    """Turns token ids, as they come, into pieces of text; their sum is the decoded whole.

    Only the ids since the last but one complete boundary are decoded again, so that a long reply costs no more per
    block than a short one. Special tokens are left out.
    """

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # from a boundary between characters on
        self._boundary = 0  # how many of them were complete when they came
        self._num_shown = 0  # characters of their text that were handed out

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete; a character that is still open waits."""
        self._ids += token_ids
        text = self._decode()
        is_open = text.endswith(REPLACEMENT)
        piece = text[self._num_shown : len(text) - is_open]
        self._num_shown += len(piece)
        if piece and not is_open:
            self._ids = self._ids[self._boundary :]
            self._boundary, self._num_shown = len(self._ids), len(self._decode())
        return piece

    def flush(self) -> str:
        """What is left at the end: a replacement sign where the reply stopped inside a character."""
        return self._decode()[self._num_shown :]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
