"""Samples of the last seconds. Pure: times come in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_SPAN_S = 1.0
_MAX_SAMPLES = 1000  # of one span: enough for a quantile


@dataclass
class _Span:
    """One second, about."""

    began_s: float
    samples: list[float] = field(default_factory=list)


class Recent:
    """Own what was measured within `window_s`; of one second the first `_MAX_SAMPLES`."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._spans: deque[_Span] = deque()

    def add(self, sample: float, now_s: float) -> None:
        spans = self._spans
        if not spans or now_s - spans[-1].began_s >= _SPAN_S:
            self._forget(now_s)
            spans.append(_Span(now_s))
        if len(spans[-1].samples) < _MAX_SAMPLES:
            spans[-1].samples.append(sample)

    def quantile(self, share: float, now_s: float) -> float | None:
        """The least sample that `share` (0 to 1) of all are not above; None: there is none."""
        self._forget(now_s)
        samples = sorted(sample for span in self._spans for sample in span.samples)
        if not samples:
            return None
        return samples[min(len(samples) - 1, int(share * len(samples)))]

    def _forget(self, now_s: float) -> None:
        while self._spans and self._spans[0].began_s <= now_s - self._window_s:
            self._spans.popleft()
