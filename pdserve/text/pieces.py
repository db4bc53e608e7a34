"""What each token stands for, in bytes.

Two families cover the models served: byte-level BPE (GPT-2's alphabet of 256 printable characters, one per byte) and
SentencePiece (a mark for spaces, `<0xAB>` tokens for bytes that no other token holds). Working on bytes makes decoding
incremental and exact: a character is complete when its UTF-8 is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from pdserve.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_KNOWN = "ByteLevel, or a sequence of Replace, ByteFallback, Fuse, Strip and Metaspace"


def _byte_level_alphabet() -> dict[str, int]:
    """Character → byte. Source: GPT-2's encoder; printable Latin-1 stands for itself, the rest is shifted to 256+."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_ALPHABET = _byte_level_alphabet()


@dataclass(frozen=True, slots=True)
class DecoderRules:
    """How a token's spelling becomes bytes."""

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    leading_spaces: int = 0
    """Spaces that the tokenizer put before a text and that decoding a whole text takes away again."""

    def spell(self, token: str) -> bytes:
        if self.byte_level:
            if all(character in _ALPHABET for character in token):
                return bytes(_ALPHABET[character] for character in token)
            return token.encode()
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()


@dataclass(slots=True)
class TokenPieces:
    """Bytes by token id, made on first use. Unknown ids stand for nothing, as in `tokenizers`."""

    core: tokenizers.Tokenizer
    rules: DecoderRules
    special: frozenset[int]
    """Ids that mark structure (end of turn, …) and have no text."""
    added: dict[int, str]
    """Ids whose spelling is plain text."""
    _bytes: dict[int, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, core: tokenizers.Tokenizer) -> TokenPieces:
        """Raises ModelError when the decoder is of no known family."""
        added = core.get_added_tokens_decoder()
        special = frozenset(token_id for token_id, token in added.items() if token.special)
        return cls(core, _rules(core), special, {token_id: token.content for token_id, token in added.items()})

    def __getitem__(self, token_id: int) -> bytes:
        piece = self._bytes.get(token_id)
        if piece is None:
            piece = self._bytes[token_id] = self._spell(token_id)
        return piece

    def _spell(self, token_id: int) -> bytes:
        if token_id in self.added:
            return self.added[token_id].encode()
        token = self.core.id_to_token(token_id)
        return b"" if token is None else self.rules.spell(token)


def _rules(core: tokenizers.Tokenizer) -> DecoderRules:
    steps = list(_flat(json.loads(core.to_str())["decoder"]))
    names = [step["type"] for step in steps]
    if "ByteLevel" in names:
        return DecoderRules(byte_level=True)
    known = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if not names or not known.issuperset(names):
        raise ModelError(f"tokenizer.json has the decoder {names or None}; pdserve knows {_KNOWN}")
    replacements, leading_spaces = [], 0
    for step in steps:
        if step["type"] == "Replace":
            replacements.append((_literal(step["pattern"]), step["content"]))
        elif step["type"] == "Metaspace":
            replacements.append((step["replacement"], " "))
            leading_spaces += step.get("prepend_scheme", "always") != "never"
        elif step["type"] == "Strip" and step["content"] == " ":
            leading_spaces += step["start"]
    return DecoderRules(
        byte_fallback="ByteFallback" in names, replacements=tuple(replacements), leading_spaces=leading_spaces
    )


def _flat(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _flat(step)
    else:
        yield decoder


def _literal(pattern: dict[str, str]) -> str:
    if "String" not in pattern:
        raise ModelError(f"tokenizer.json's decoder replaces the pattern {pattern}; pdserve knows literal ones")
    return pattern["String"]
