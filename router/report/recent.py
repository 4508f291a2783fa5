"""What an operator looks at first: the requests that ended last, and the KV that moved last."""

from __future__ import annotations

from collections import deque

from baton.clock import NowS
from router.report.ended_request import EndedRequest

NUM_KEPT = 60
FLOWS_S = 10.0
_MAX_FLOWS = 10_000


class RecentTraffic:
    """Own both; bounded."""

    def __init__(self, clock: NowS) -> None:
        self._clock = clock
        self.requests: deque[EndedRequest] = deque(maxlen=NUM_KEPT)
        self._flows: deque[tuple[float, str, str, int]] = deque(maxlen=_MAX_FLOWS)

    def handed_off(self, prefill: str, decode: str, num_bytes: int) -> None:
        self._flows.append((self._clock(), prefill, decode, num_bytes))

    def bytes_per_s(self) -> dict[tuple[str, str], float]:
        """Return the rate from each prefill to each decode worker, over the last `FLOWS_S`."""
        since_s = self._clock() - FLOWS_S
        while self._flows and self._flows[0][0] < since_s:
            self._flows.popleft()
        rates: dict[tuple[str, str], float] = {}
        for _, prefill, decode, num_bytes in self._flows:
            rates[prefill, decode] = rates.get((prefill, decode), 0.0) + num_bytes / FLOWS_S
        return rates
