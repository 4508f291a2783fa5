"""Find the first stop string in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scanned:
    text: str  # certain to be no part of a stop string
    stop: str | None


def _borders(pattern: str) -> list[int]:
    """For every prefix of `pattern`, the length of its longest proper prefix that is a suffix."""
    borders = [0] * len(pattern)
    matched = 0
    for position in range(1, len(pattern)):
        while matched and pattern[position] != pattern[matched]:
            matched = borders[matched - 1]
        if pattern[position] == pattern[matched]:
            matched += 1
        borders[position] = matched
    return borders


class StopScanner:
    """Hold back what could begin a stop string; what it lets through never depends on how the text
    was cut into pieces. Among several stop strings the one that ends first wins, then the longest.

    Knuth-Morris-Pratt on every stop string at once: amortised O(stop strings) a character.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._patterns = [(pattern, _borders(pattern)) for pattern in stop]
        self._matched = [0] * len(self._patterns)
        self._held = ""
        self._stopped: str | None = None

    def push(self, text: str, *, may_stop: bool = True) -> Scanned:
        """`may_stop` False: a stop string that ends in this text is none; one that begins in it
        and ends in a later one still is."""
        if self._stopped is not None:
            return Scanned("", self._stopped)
        if not self._patterns:
            return Scanned(text, None)
        seen = len(self._held)
        text = self._held + text
        for position in range(seen, len(text)):
            found = self._advance(text[position])
            if found is not None and may_stop:
                self._stopped, self._held = found, ""
                return Scanned(text[: position + 1 - len(found)], found)
        cut = len(text) - max(self._matched)
        self._held = text[cut:]
        return Scanned(text[:cut], None)

    def finish(self) -> str:
        """What was held back, once it is certain that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        found: str | None = None
        for index, (pattern, borders) in enumerate(self._patterns):
            matched = self._matched[index]
            while matched and pattern[matched] != char:
                matched = borders[matched - 1]
            if pattern[matched] == char:
                matched += 1
            if matched == len(pattern):
                matched = borders[matched - 1]
                if found is None or len(pattern) > len(found):
                    found = pattern
            self._matched[index] = matched
        return found
