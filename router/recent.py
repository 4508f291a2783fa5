"""What was seen in the last seconds, second by second. Pure: times come in."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import numpy as np

SPAN_S = 1.0
_MAX_SAMPLES = 64  # of one span: quantiles over many spans take a millisecond
T = TypeVar("T")


class Spans(Generic[T]):
    """Own one `T` for each second, about, in which there was anything, of the last `window_s`."""

    def __init__(self, window_s: float, make: Callable[[], T]) -> None:
        self._window_s, self._make = window_s, make
        self._spans: deque[tuple[float, T]] = deque()

    def at(self, now_s: float) -> T:
        """That of this second."""
        spans = self._spans
        if not spans or now_s - spans[-1][0] >= SPAN_S:
            self._forget(now_s)
            spans.append((now_s, self._make()))
        return spans[-1][1]

    def within(self, now_s: float, last_s: float = math.inf) -> Iterator[T]:
        """Of the whole window, or of its `last_s` alone; oldest first."""
        self._forget(now_s)
        return (each for at_s, each in self._spans if now_s - at_s < last_s)

    def _forget(self, now_s: float) -> None:
        while self._spans and self._spans[0][0] <= now_s - self._window_s:
            self._spans.popleft()


class _Samples:
    """Own some of the samples of a span, each as likely as any other (Vitter 1985, algorithm R)."""

    def __init__(self) -> None:
        self.kept: list[float] = []
        self.num_seen = 0

    def add(self, sample: float, rng: random.Random) -> None:
        self.num_seen += 1
        if len(self.kept) < _MAX_SAMPLES:
            self.kept.append(sample)
        elif (place := rng.randrange(self.num_seen)) < _MAX_SAMPLES:
            self.kept[place] = sample


class Recent:
    """Own samples of what was measured within `window_s`: each stands for as many as its second
    had for one that was kept."""

    def __init__(self, window_s: float) -> None:
        self._spans = Spans(window_s, _Samples)
        self._rng = random.Random(0)

    def add(self, sample: float, now_s: float) -> None:
        self._spans.at(now_s).add(sample, self._rng)

    def count(self, now_s: float, last_s: float = math.inf) -> int:
        return sum(span.num_seen for span in self._spans.within(now_s, last_s))

    def quantile(self, share: float, now_s: float, last_s: float = math.inf) -> float | None:
        """The least sample that `share` (0 to 1) of all are not above; None: there is none."""
        spans = list(self._spans.within(now_s, last_s))
        if not spans:
            return None
        samples = np.concatenate([span.kept for span in spans])
        num_kept = [len(span.kept) for span in spans]
        stands_for = [span.num_seen / len(span.kept) for span in spans]
        order = np.argsort(samples)
        num_up_to = np.cumsum(np.repeat(stands_for, num_kept)[order])
        at = np.searchsorted(num_up_to, share * num_up_to[-1], side="right")
        return float(samples[order[min(at, len(samples) - 1)]])
