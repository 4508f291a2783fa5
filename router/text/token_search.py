"""Where special tokens stand in a text that a client wrote, which may look like them throughout."""

from __future__ import annotations

import itertools
import os.path
import re
from collections.abc import Collection, Iterable

_CHARS_AT_ONCE = 64 << 10
"""What one call searches: it holds the interpreter's lock, and so the event loop."""


def _any_of(texts: Iterable[str]) -> str:
    """Match any of the texts, the longest that is there. It forks once a character, where a list of
    all would be tried at every position: seconds for 4 MB and a thousand special tokens."""
    forks = []
    for _, group in itertools.groupby(sorted(texts, reverse=True), lambda text: text[:1]):
        alike = list(group)
        stem = os.path.commonprefix(alike)  # noqa: RUF071  of texts, indeed
        rest = _any_of(text[len(stem) :] for text in alike) if len(alike) > 1 else ""
        forks.append(re.escape(stem) + rest)
    return f"(?:{'|'.join(forks)})" if forks else "(?!)"


class TokenSearch:
    """Find special tokens in texts, a part of a long one at a time."""

    def __init__(self, tokens: Collection[str]) -> None:
        self._pattern = re.compile(_any_of(set(tokens)))
        self._longest = max(map(len, tokens), default=0)

    def first(self, text: str, start: int = 0) -> re.Match[str] | None:
        """Find the first one from `start` on."""
        for at in range(start, len(text), _CHARS_AT_ONCE):
            end = at + _CHARS_AT_ONCE
            found = self._pattern.search(text, at, end + self._longest)
            if found is not None and found.start() < end:
                return found
        return None

    def split(self, text: str) -> list[str]:
        """Cut a text at its special tokens: every second piece is one."""
        pieces, start = list[str](), 0
        while found := self.first(text, start):
            pieces += (text[start : found.start()], found[0])
            start = found.end()
        return [*pieces, text[start:]]
