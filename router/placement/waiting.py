"""Who waits in line for what, as a router reports it."""

from __future__ import annotations

from collections.abc import Sequence

from baton.config.router import PlacementConfig
from router.fleet.fleet import Fleet
from router.placement.ticket import Ticket
from router.report.figures import Waiting


def waiting_requests(
    tickets: Sequence[Ticket], fleet: Fleet, config: PlacementConfig, now_s: float
) -> list[Waiting]:
    """Who waits, and for what: a prefill is useless without room at a decode worker."""
    arrays = fleet.arrays
    decodes = arrays.usable & arrays.can_decode
    prefills = arrays.usable & arrays.can_prefill
    has_roles = decodes.any() and (config.local_prefill != "never" or prefills.any())
    open_ = decodes & (arrays.running < arrays.max_running)
    room = float(arrays.free_tokens[open_].max(initial=0.0))
    return [
        Waiting(
            num_uncached_tokens=ticket.uncached_tokens,
            wait_s=max(0.0, now_s - ticket.since_s),
            for_decode=room < ticket.num_tokens,
            is_held=not has_roles,
        )
        for ticket in tickets
    ]
