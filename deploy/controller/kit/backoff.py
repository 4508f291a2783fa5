"""How long to wait after one more failure. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

_MOST_DOUBLINGS = 30


@dataclass(frozen=True)
class Backoff:
    """Doubles from `first_s` to `longest_s`; half of it is jitter, so that those who failed
    together do not come back together."""

    first_s: float
    longest_s: float

    def delay_s(self, num_failures: int, rng: random.Random) -> float:
        """After that many failures in a row, at least one."""
        assert num_failures > 0, num_failures
        full_s = self.first_s * 2.0 ** min(num_failures - 1, _MOST_DOUBLINGS)
        return min(full_s, self.longest_s) * rng.uniform(0.5, 1.0)
