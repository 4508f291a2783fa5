"""What was seen in the last seconds, second by second. Pure: times come in."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

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

    def within(self, now_s: float) -> Iterator[T]:
        """Of the whole window, oldest first."""
        self._forget(now_s)
        return (each for _, each in self._spans)

    def seconds(self, now_s: float) -> float:
        """Since the oldest of them began; a span at least."""
        self._forget(now_s)
        return max(now_s - self._spans[0][0], SPAN_S) if self._spans else SPAN_S

    def _forget(self, now_s: float) -> None:
        while self._spans and self._spans[0][0] <= now_s - self._window_s:
            self._spans.popleft()


class _Samples:
    """Own some of the samples of a span, each as likely as any other (Vitter 1985, algorithm R)."""

    def __init__(self) -> None:
        self.kept: list[float] = []
        self._num_seen = 0

    def add(self, sample: float, rng: random.Random) -> None:
        self._num_seen += 1
        if len(self.kept) < _MAX_SAMPLES:
            self.kept.append(sample)
        elif (place := rng.randrange(self._num_seen)) < _MAX_SAMPLES:
            self.kept[place] = sample


class Recent:
    """Own samples of what was measured within `window_s`."""

    def __init__(self, window_s: float) -> None:
        self._spans = Spans(window_s, _Samples)
        self._rng = random.Random(0)

    def add(self, sample: float, now_s: float) -> None:
        self._spans.at(now_s).add(sample, self._rng)

    def quantile(self, share: float, now_s: float) -> float | None:
        """The least sample that `share` (0 to 1) of all are not above; None: there is none."""
        samples = sorted(sample for span in self._spans.within(now_s) for sample in span.kept)
        if not samples:
            return None
        return samples[min(len(samples) - 1, int(share * len(samples)))]
