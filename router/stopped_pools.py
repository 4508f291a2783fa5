"""Pools that were scaled to zero on purpose: requests that need one are held until it is back.

1. The registry tells of a pool that is to have no replica: it is stopped, also while its last
   workers drain.
2. It is to have some again: it is coming back, however long its workers take to load.
3. One of them is live, or has failed to start: it is a pool like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.cohorts import Cohort
from router.config import LocalPrefill


@dataclass(frozen=True)
class PoolReport:
    """One pool as the registry reports it."""

    name: str
    can_prefill: bool
    can_decode: bool
    desired_replicas: int
    live_replicas: int = 0
    num_failed_starts: int = 0
    cohort: Cohort = ""
    cohort_weight: int = 0


class StoppedPools:
    """Own which pools are stopped or coming back."""

    def __init__(self) -> None:
        self._pools: Sequence[PoolReport] = ()
        self._away: set[str] = set()

    def update(self, pools: Sequence[PoolReport]) -> None:
        """Take in all pools as the registry sees them now."""
        self._away = {pool.name for pool in pools if self._is_away(pool)}
        self._pools = pools

    def _is_away(self, pool: PoolReport) -> bool:
        if not pool.desired_replicas:
            return True
        is_coming = not pool.live_replicas and not pool.num_failed_starts
        return pool.name in self._away and is_coming

    def holds(self, local_prefill: LocalPrefill) -> bool:
        """Whether a request is to wait, up to its own deadline: every pool of a role that it cannot
        do without is away."""
        decodes = [pool.name for pool in self._pools if pool.can_decode]
        prefills = [pool.name for pool in self._pools if pool.can_prefill]
        needed = [decodes] + ([prefills] if local_prefill == "never" else [])
        return any(names and self._away.issuperset(names) for names in needed)
