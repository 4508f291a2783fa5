"""The memory that a worker offers to its writers; whether what a lease offers can be used."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kv_transfer.errors import LeaseError
from kv_transfer.layout import RegionLayout
from kv_transfer.lease import Lease, RankLease, Region
from kv_transfer.routes import Route, check_width


class RankOffers:
    """What each rank of this worker has told that it offers. Any thread."""

    def __init__(self, tp_size: int) -> None:
        self._tp_size = tp_size
        self._offers: dict[int, RankLease] = {}
        self._complete = threading.Event()

    def add(self, offer: RankLease) -> None:
        self._offers[offer.tp_rank] = offer
        if len(self._offers) == self._tp_size:
            self._complete.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until every rank has told. Blocks the thread."""
        return self._complete.wait(timeout_s)

    def all(self) -> tuple[RankLease, ...]:
        """Of every rank, in order."""
        assert self._complete.is_set(), "not every rank has told which memory it offers"
        return tuple(self._offers[rank] for rank in range(self._tp_size))


def check_lease(lease: Lease, layout: RegionLayout, regions: Sequence[Region]) -> None:
    """Raise LeaseError when the lease's memory or tables do not fit this rank's layout, or it lasts
    no time."""
    if not lease.renew_within_s > 0:
        raise LeaseError(f"the lease lasts for {lease.renew_within_s:g} s")
    groups = len(layout.layout.groups)
    if len(lease.block_ids) != groups:
        raise LeaseError(f"the lease has {len(lease.block_ids)} block tables, not {groups}")
    if [rank.tp_rank for rank in lease.ranks] != list(range(lease.owner.tp_size)):
        raise LeaseError("the lease does not offer the memory of every rank of its owner")
    check_width(layout.layout, lease.owner.tp_size)
    for rank in lease.ranks:
        Route(layout, regions, rank.tp_rank, len(lease.ranks), rank.regions)
