"""Pools that are not, or not yet, what they are to be: requests that need one that was scaled to
zero on purpose are held until it is back, and others are told whether to come again.

Of each role, over all pools that can do it:

1. The registry tells that they are to have no replica: the role is away, also while their last
   workers drain.
2. One is to have some again: it is coming back, however long its workers take to load. A router
   that did not see it go hears of it from the registry.
3. A worker is live, or has failed to start: it is a role like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.config.router import LocalPrefill


@dataclass(frozen=True)
class PoolReport:
    """One pool as the registry reports it."""

    name: str
    can_prefill: bool
    can_decode: bool
    desired_replicas: int
    live_replicas: int = 0
    num_failed_starts: int = 0
    prefill_comes_back: bool = False
    """It is to have workers again, and the role was away, as the registry remembers it."""
    decode_comes_back: bool = False


class StoppedPools:
    """Own which roles are away or coming back."""

    def __init__(self) -> None:
        self._prefill_is_away = self._decode_is_away = False

    def update(self, pools: Sequence[PoolReport]) -> None:
        """Take in all pools as the registry sees them now."""
        prefills = [pool for pool in pools if pool.can_prefill]
        decodes = [pool for pool in pools if pool.can_decode]
        prefill_was_away = self._prefill_is_away or any(p.prefill_comes_back for p in pools)
        decode_was_away = self._decode_is_away or any(p.decode_comes_back for p in pools)
        self._prefill_is_away = _is_away(prefills, prefill_was_away)
        self._decode_is_away = _is_away(decodes, decode_was_away)

    def holds(self, local_prefill: LocalPrefill) -> bool:
        """Whether a request is to wait, up to its own deadline: a role that it cannot do without
        is away."""
        return self._decode_is_away or (local_prefill == "never" and self._prefill_is_away)


def _is_away(pools: Sequence[PoolReport], was_away: bool) -> bool:
    """Of one role's pools. A registry that tells of none has yet to be told of them itself."""
    if pools and not any(pool.desired_replicas for pool in pools):
        return True
    return was_away and not any(pool.live_replicas or pool.num_failed_starts for pool in pools)
