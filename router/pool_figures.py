"""What clients saw of late of each pool: how long first tokens took of the prompts that it
prefilled, and later ones of the streams that it decodes.

Pure but for the times that come in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.clock import NowS
from baton.v1 import control_pb2
from router.recent import Recent

WINDOW_S = 60.0
RECENT_S = 10.0
_SHARE = 0.95


@dataclass
class _Pool:
    ttft_s: Recent = field(default_factory=lambda: Recent(WINDOW_S))
    gaps_s: Recent = field(default_factory=lambda: Recent(WINDOW_S))


class PoolFigures:
    """Own what was seen of each pool in the last `WINDOW_S`; one of which nothing was seen any more
    is forgotten."""

    def __init__(self, clock: NowS) -> None:
        self._clock = clock
        self._pools: dict[str, _Pool] = {}

    def saw_first_token(self, pool: str, ttft_s: float) -> None:
        """Of a request whose prompt a worker of the pool prefilled; since its arrival."""
        self._of(pool).ttft_s.add(ttft_s, self._clock())

    def saw_gap(self, pool: str, gap_s: float) -> None:
        """Between two tokens of a stream that a worker of the pool decodes."""
        self._of(pool).gaps_s.add(gap_s, self._clock())

    def report(self) -> list[control_pb2.PoolFigures]:
        now_s = self._clock()
        told = []
        for name, pool in sorted(self._pools.items()):
            ttft_s = pool.ttft_s.quantile(_SHARE, now_s)
            gap_s = pool.gaps_s.quantile(_SHARE, now_s)
            if ttft_s is None and gap_s is None:
                del self._pools[name]
            else:
                told.append(
                    control_pb2.PoolFigures(
                        pool=name,
                        ttft_p95_s=ttft_s,
                        itl_p95_s=gap_s,
                        recent_itl_p95_s=pool.gaps_s.quantile(_SHARE, now_s, RECENT_S),
                        num_recent_gaps=pool.gaps_s.count(now_s, RECENT_S),
                    )
                )
        return told

    def _of(self, pool: str) -> _Pool:
        found = self._pools.get(pool)
        if found is None:
            found = self._pools[pool] = _Pool()
        return found
