"""How often something may be tried. Standard library only."""

from __future__ import annotations

import random
from dataclasses import dataclass

_MOST_DOUBLINGS = 30


@dataclass
class Backoff:
    """How long to wait before the next try: doubles from `first_s` to `longest_s`. Half of it is
    jitter, so that those who failed together do not come back together."""

    first_s: float
    longest_s: float
    num_failures: int = 0
    """How many failures there were in a row."""

    def next_s(self) -> float:
        """The wait after a further failure."""
        full_s = self.first_s * 2.0 ** min(self.num_failures, _MOST_DOUBLINGS)
        self.num_failures += 1
        return min(full_s, self.longest_s) * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self.num_failures = 0


class TokenBucket:
    """`burst` tokens at first, refilled at `per_s` up to `burst`."""

    def __init__(self, burst: float, per_s: float, now_s: float) -> None:
        self._burst, self._per_s = burst, per_s
        self._level, self._at_s = float(burst), now_s

    def level(self, now_s: float) -> float:
        self._level = min(self._burst, self._level + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        return self._level

    def take(self, now_s: float) -> bool:
        """Take a token, if there is one."""
        has_one = self.level(now_s) >= 1
        self._level -= has_one
        return has_one
