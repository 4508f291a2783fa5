"""What clients see of a pool: the figures of all routers, as one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton.v1 import control_pb2


@dataclass(frozen=True)
class SeenByClients:
    """95th percentiles of the last minute, seconds; None: nothing was seen."""

    ttft_s: float | None = None
    """Of prompts that the pool prefilled."""
    itl_s: float | None = None
    """Of streams that it decodes."""

    def worse(self, other: SeenByClients) -> SeenByClients:
        """The higher of each figure, so that no client sees worse."""
        return SeenByClients(_worse(self.ttft_s, other.ttft_s), _worse(self.itl_s, other.itl_s))


NOTHING_SEEN = SeenByClients()


def _worse(one: float | None, other: float | None) -> float | None:
    known = [seconds for seconds in (one, other) if seconds is not None]
    return max(known, default=None)


def seen_by_clients(
    routers: Iterable[control_pb2.ReportRouterRequest],
) -> dict[str, SeenByClients]:
    """The worst figures of each pool that a router reported."""
    found: dict[str, SeenByClients] = {}
    for router in routers:
        for figures in router.pools:
            seen = SeenByClients(
                figures.ttft_p95_s if figures.HasField("ttft_p95_s") else None,
                figures.itl_p95_s if figures.HasField("itl_p95_s") else None,
            )
            found[figures.pool] = found.get(figures.pool, NOTHING_SEEN).worse(seen)
    return found
