"""A clock that stands still while its process does.

Whoever judges others by their silence must first be sure that it listened itself. A stopped or
starved process, or a machine that was moved, reads late what the others have said in the meantime.
"""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]


class AwakeClock:
    """Counts seconds from one `look` to the next, but no more than `longest_s` for each.

    Its owner must look more often than that. A longer gap still counts for `longest_s`, so time
    goes on for an owner that is late at every look. A call reads the time and changes nothing.
    """

    def __init__(self, clock: Clock, longest_s: float) -> None:
        self._clock = clock
        self._longest_s = longest_s
        self._looked_at = clock()
        self._awake_s = 0.0

    def __call__(self) -> float:
        return self._awake_s + min(self._clock() - self._looked_at, self._longest_s)

    def look(self) -> None:
        """Count the time since the last look."""
        now = self._clock()
        self._awake_s += min(now - self._looked_at, self._longest_s)
        self._looked_at = now
