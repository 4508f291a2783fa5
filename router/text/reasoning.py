"""What a model thinks before it answers: `<think>...</think>`, split off while it streams."""

from __future__ import annotations

import enum
from dataclasses import dataclass

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Split:
    reasoning: str
    content: str


class _State(enum.Enum):
    START = "start"
    THINKS = "thinks"
    BETWEEN = "between"  # white space before the answer is nobody's
    ANSWERS = "answers"


class ReasoningSplitter:
    """Own what was not decided yet. What it returns does not depend on how the text was cut."""

    def __init__(self, *, is_open: bool) -> None:
        """`is_open`: the prompt ends with `<think>` already."""
        self._state = _State.THINKS if is_open else _State.START
        self._held = ""

    @property
    def is_undecided(self) -> bool:
        """Whether what came so far may yet be the model's own `<think>`."""
        return self._state is _State.START

    def push(self, text: str) -> Split:
        if self._state is _State.ANSWERS:
            return Split("", text)
        text, self._held = self._held + text, ""
        if self._state is _State.START:
            text = self._begin(text)
        reasoning = ""
        if self._state is _State.THINKS:
            reasoning, text = self._think(text)
        if self._state is _State.BETWEEN:
            text = text.lstrip()
            if text:
                self._state = _State.ANSWERS
        return Split(reasoning, text)

    def finish(self) -> Split:
        """Return what was held back, once it is certain that nothing follows."""
        held, self._held = self._held, ""
        return Split(held, "") if self._state is _State.THINKS else Split("", held)

    def _begin(self, text: str) -> str:
        stripped = text.lstrip()
        if stripped.startswith(OPEN):
            self._state = _State.THINKS
            return stripped[len(OPEN) :]
        if OPEN.startswith(stripped):
            self._held = text
            return ""
        self._state = _State.ANSWERS
        return text

    def _think(self, text: str) -> tuple[str, str]:
        """Return reasoning, and what comes after it. White space around reasoning is kept."""
        reasoning, found, rest = text.partition(CLOSE)
        if found:
            self._state = _State.BETWEEN
            return reasoning, rest
        for length in range(min(len(CLOSE) - 1, len(text)), 0, -1):
            if CLOSE.startswith(text[-length:]):
                self._held = text[-length:]
                return text[:-length], ""
        return text, ""
