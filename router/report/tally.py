"""Counters and histograms that cost a token a fraction of a microsecond: plain numbers, written by
the event loop alone. They become Prometheus' metrics at a scrape, in another thread. An instrument
of prometheus_client takes a lock at each observation."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Generic, TypeVar, cast

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString


class Count:
    __slots__ = ("value",)
    metric: Any = CounterMetricFamily

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount

    @property
    def sample(self) -> tuple[Any, ...]:
        """What prometheus_client's `add_metric` takes."""
        return (self.value,)


class Buckets:
    """Own how many values were above the bound before and at most each bound; and their sum."""

    __slots__ = ("bounds", "counts", "total")
    metric: Any = HistogramMetricFamily

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def sample(self) -> tuple[Any, ...]:
        bounds = [*map(floatToGoString, self.bounds), "+Inf"]
        return list(zip(bounds, accumulate(self.counts.copy()))), self.total


T = TypeVar("T", Count, Buckets)


class Family(Generic[T]):
    """Own a metric's counters, one for each combination of its labels' values."""

    def __init__(
        self, name: str, text: str, label_names: Sequence[str], make: Callable[[], T]
    ) -> None:
        self.name, self._text, self._label_names = name, text, label_names
        self._make: Callable[[], T] = make
        self._children: dict[tuple[str, ...], T] = {} if label_names else {(): make()}

    def labels(self, *values: str) -> T:
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self._make()
        return child

    @property
    def children(self) -> dict[tuple[str, ...], T]:
        return self._children.copy()

    def collect(self, name: str = "", renamed: Mapping[str, str] | None = None) -> Metric:
        """`name`, `renamed`: what it and its labels are called, where that is another name."""
        labels = [(renamed or {}).get(label, label) for label in self._label_names]
        metric = self._make().metric(name or self.name, self._text, labels=labels)
        for values, child in self.children.items():
            metric.add_metric(values, *child.sample)
        return cast(Metric, metric)


class Names:
    """Own the first `most` names, which count apart; any other counts as "other"."""

    def __init__(self, most: int) -> None:
        self._most, self._known = most, set[str]()

    def of(self, name: str) -> str:
        if len(self._known) < self._most:
            self._known.add(name)
        return name if name in self._known else "other"
