"""How long to wait before asking a peer again."""

from __future__ import annotations

import random


class Backoff:
    """Doubles from `first_s` to `longest_s`, with jitter so that routers do not march in step."""

    def __init__(self, first_s: float, longest_s: float, rng: random.Random) -> None:
        self._first_s, self._longest_s, self._rng = first_s, longest_s, rng
        self._next_s = first_s

    def reset(self) -> None:
        self._next_s = self._first_s

    def next_s(self) -> float:
        wait_s = self._next_s * self._rng.uniform(0.5, 1.0)
        self._next_s = min(self._longest_s, self._next_s * 2)
        return wait_s
