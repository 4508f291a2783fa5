"""How the gap between tokens grows with the streams that a worker runs, learned as it is seen.

A decode step takes a time of its own, the base, and some for each of its streams. A stream lasts as
long as its tokens take, so fewer workers have more streams to run in all: what stays the same is
the tokens that are wanted each second. The point of each number of streams, rounded to a quarter of
it, is the newest, smoothed: what was seen once stays known while other numbers are seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.planner.measure import ItlPoint

_STEP = 1.25  # between two points that are told apart
_NEWEST = 0.1  # what a new figure weighs
_REACH = 4.0  # times the most streams ever seen: beyond it the line is not believed


@dataclass(frozen=True)
class ItlCurve:
    """Points by their rounded number of streams, in its order."""

    points: tuple[tuple[int, ItlPoint], ...] = ()

    def with_point(self, seen: ItlPoint) -> ItlCurve:
        """The curve that knows this, too."""
        key = math.floor(math.log(seen.streams, _STEP))
        known = dict(self.points)
        known[key] = _blend(known[key], seen) if key in known else seen
        return ItlCurve(tuple(sorted(known.items(), key=lambda item: item[0])))

    @property
    def least_s(self) -> float:
        """How near each other one stream alone has its tokens: more workers bring them no nearer.
        0 where nothing is known."""
        return sum(self._line()) if self.points else 0.0

    def reaches(self, itl_s: float) -> bool:
        """Whether more workers can bring tokens so near each other."""
        return self.least_s <= itl_s

    def workers_for_itl(self, tokens_per_s: float, now_s: float, target_s: float) -> float:
        """Workers for tokens to be `target_s` apart, above 0, which are `now_s` apart now; 0 where
        that is not known, or out of reach."""
        if not self.points or not self.reaches(target_s):
            return 0.0
        base_s, slope_s = self._line()
        streams = tokens_per_s * now_s
        if not self._is_line:
            return streams * slope_s / target_s
        most = _REACH * max(point.streams for _, point in self.points)
        if base_s >= target_s:  # just the target, whatever the streams
            return streams / most
        return max(slope_s * tokens_per_s * target_s / (target_s - base_s), streams / most)

    def workers_for_kv(self, tokens_per_s: float, now_s: float, kv_of_stream: float) -> float:
        """Workers that hold the streams' KV, of which each takes that share of a worker: the more
        workers, the sooner streams are over."""
        if not self._is_line:
            return tokens_per_s * now_s * kv_of_stream
        base_s, slope_s = self._line()
        return tokens_per_s * (slope_s + min(base_s, now_s) * kv_of_stream)

    @property
    def _is_line(self) -> bool:
        """Whether the base can be told: else the gap is taken as in proportion to the streams,
        which promises the most of more workers, and the streams as fixed."""
        return len(self.points) > 1

    def _line(self) -> tuple[float, float]:
        """Seconds of a step without streams and of each stream, neither negative: least squares."""
        streams = [point.streams for _, point in self.points]
        gaps_s = [point.itl_s for _, point in self.points]
        mean_streams, mean_s = sum(streams) / len(streams), sum(gaps_s) / len(gaps_s)
        spread = sum((x - mean_streams) ** 2 for x in streams)
        if spread <= 0:
            return 0.0, mean_s / mean_streams
        covariance = sum((x - mean_streams) * (y - mean_s) for x, y in zip(streams, gaps_s))
        slope_s = covariance / spread
        if slope_s <= 0:
            return mean_s, 0.0
        base_s = mean_s - slope_s * mean_streams
        if base_s >= 0:
            return base_s, slope_s
        return 0.0, sum(x * y for x, y in zip(streams, gaps_s)) / sum(x * x for x in streams)


def _blend(old: ItlPoint, new: ItlPoint) -> ItlPoint:
    return ItlPoint(
        old.streams + _NEWEST * (new.streams - old.streams),
        old.itl_s + _NEWEST * (new.itl_s - old.itl_s),
    )
