"""What each token contributes to a text, as bytes.

Nearly every tokenizer's decoder is a concatenation of per-token bytes with a rule for the very
beginning. Knowing the bytes makes detokenization exact and O(1) a token; a decoder that is more
than that is left to `WindowDecoder` (see `detokenizer`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte, reversed.

    Bytes that are printable in Latin-1 stand for themselves, the others are numbered from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + position): byte for position, byte in enumerate(others)})
    return alphabet


_ALPHABET = _byte_level_alphabet()


@dataclass(frozen=True)
class DecodeRules:
    """A tokenizer's decoder, reduced to what happens to one token and to the text's beginning."""

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()  # a single character each, and its text
    byte_fallback: bool = False
    strip_first_token: str = ""  # dropped from the first token wherever it occurs
    strip_start: tuple[str, int] = ("", 0)  # a character, and how often it is dropped at the start

    @classmethod
    def read(cls, tokenizer: Tokenizer) -> DecodeRules | None:
        """Read a tokenizer's decoder. None: tokens alone do not show it."""
        decoder = json.loads(tokenizer.to_str()).get("decoder")
        if decoder is None:
            return None
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        if [step["type"] for step in steps] == ["ByteLevel"]:
            return cls(byte_level=True)
        return cls._read_pieces(steps)

    @classmethod
    def _read_pieces(cls, steps: list[dict[str, Any]]) -> DecodeRules | None:
        """Decoders of the SentencePiece kind."""
        replacements: list[tuple[str, str]] = []
        values: dict[str, Any] = {}
        fused = False
        for step in steps:
            match step:
                case {"type": "Replace", "pattern": {"String": str(old)}} if len(old) == 1:
                    replacements.append((old, step["content"]))
                case {"type": "ByteFallback"}:
                    values["byte_fallback"] = True
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Strip", "stop": 0} if fused:
                    values["strip_start"] = (step["content"], step["start"])
                case {"type": "Metaspace"}:
                    replacements.append((step["replacement"], " "))
                    if step.get("prepend_scheme", "always") != "never":
                        values["strip_first_token"] = step["replacement"]
                case _:
                    return None
        return cls(replacements=tuple(replacements), **values)

    def token_bytes(self, token: str, *, first: bool) -> bytes:
        if self.byte_level:
            if all(char in _ALPHABET for char in token):
                return bytes(_ALPHABET[char] for char in token)
            return token.encode()
        if self.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        if first and self.strip_first_token:
            token = token.replace(self.strip_first_token, "")
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()


class TokenBytes(dict[int, bytes]):
    """Token id to bytes, filled as ids are met; special and unknown ids give none."""

    def __init__(
        self, tokenizer: Tokenizer, rules: DecodeRules, shown: Collection[str] = ()
    ) -> None:
        """`shown`: special tokens that are text all the same."""
        super().__init__()
        self.rules = rules
        self._tokenizer = tokenizer
        self._special = {
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special and token.content not in shown
        }

    def __missing__(self, token_id: int) -> bytes:
        data = self._bytes(token_id, first=False)
        self[token_id] = data
        return data

    def is_shown(self, token_id: int) -> bool:
        return token_id not in self._special and self._tokenizer.id_to_token(token_id) is not None

    def first(self, token_id: int) -> bytes:
        """Bytes of a token that begins a text."""
        return self._bytes(token_id, first=True)

    def _bytes(self, token_id: int, *, first: bool) -> bytes:
        if token_id in self._special:
            return b""
        token: str | None = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else self.rules.token_bytes(token, first=first)
