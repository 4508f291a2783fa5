"""How long to wait for a worker that does not answer: it may keep what nobody else has."""

from __future__ import annotations

import math

from baton.clock import NowS

SETTLED_S = 1.0
"""A connection counts only after it has lasted this long."""


class Contact:
    """Own the time since which a worker seems out of reach. If its connections all end as soon as
    they begin, that is the start of the first one.
    """

    def __init__(self, patience_s: float, clock: NowS) -> None:
        self._patience_s, self._clock = patience_s, clock
        self._settled_s = min(SETTLED_S, patience_s)
        self._in_doubt_since_s = clock()
        self._began_s = math.inf  # the connection that there is
        self._was_none_at_s = -math.inf  # when the last one ended, if it did too soon

    def begin(self) -> None:
        """A connection."""
        now = self._began_s = self._clock()
        if now - self._was_none_at_s >= self._patience_s:
            self._in_doubt_since_s = now

    def end(self) -> None:
        now = self._clock()
        if self._is_settled(now):
            self._in_doubt_since_s, self._was_none_at_s = now, -math.inf
        else:
            self._was_none_at_s = now
        self._began_s = math.inf

    @property
    def may_be_heard(self) -> bool:
        """Now or in a moment."""
        now = self._clock()
        return self._is_settled(now) or now - self._in_doubt_since_s < self._patience_s

    def _is_settled(self, now: float) -> bool:
        return now - self._began_s >= self._settled_s
