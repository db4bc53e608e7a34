"""Tokens to text, a few at a time."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from pdserve.text.pieces import TokenPieces


class Detokenizer:
    """Turns a stream of token ids into text deltas that never break a character.

    The bytes of an unfinished character wait for the rest; bytes that can be no character become U+FFFD, as few as a
    decoding of the whole would give. All deltas and `finish()` together are the decoding of all tokens, at a cost
    linear in their number. With `continues` the text goes on from another (a prompt), and a leading space is kept.
    """

    def __init__(self, pieces: TokenPieces, *, continues: bool = False, skip_special: bool = True) -> None:
        self._pieces = pieces
        self._skipped = pieces.special if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._spaces_to_strip = 0 if continues else pieces.rules.leading_spaces

    def push(self, tokens: Iterable[int]) -> str:
        """The text that `tokens` complete."""
        data = b"".join([self._pieces[token] for token in tokens if token not in self._skipped])
        return self._strip(self._utf8.decode(data))

    def finish(self) -> str:
        """What an unfinished character leaves: U+FFFD or nothing."""
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while text and self._spaces_to_strip:
            if text[0] != " ":
                self._spaces_to_strip = 0
                break
            text = text[1:]
            self._spaces_to_strip -= 1
        return text
