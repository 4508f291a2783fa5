"""Which workers of a mixed pool act in one role only. Pure.

Every worker of a mixed pool can act in both roles. So a change of roles only reaches the routers
and needs no new process: running requests end where they are, new ones follow the new roles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.fleet import Role


@dataclass(frozen=True)
class RolePlan:
    """How many workers act as prefill only and as decode only; the others act as both."""

    prefill: int = 0
    decode: int = 0

    def leaves_both_roles(self, num_workers: int) -> bool:
        """Whether `num_workers` are enough for the plan and leave each role at least one."""
        is_enough = self.prefill + self.decode <= num_workers
        return is_enough and max(self.prefill, self.decode) < num_workers


def active_roles(plan: RolePlan, worker_ids: Sequence[str]) -> dict[str, Role]:
    """Active roles of a mixed pool's workers that take new requests.

    Prefill takes the lowest slots and decode the highest, so that another plan changes few workers.
    If there are too few workers, or one role would have none, all act as both: a role must not go
    without a worker because some are missing.
    """
    if not plan.leaves_both_roles(len(worker_ids)):
        return dict.fromkeys(worker_ids, Role.MIXED)
    in_order = sorted(worker_ids, key=_by_index)
    first_decode = len(in_order) - plan.decode
    return {
        worker_id: Role.PREFILL
        if number < plan.prefill
        else Role.DECODE
        if number >= first_decode
        else Role.MIXED
        for number, worker_id in enumerate(in_order)
    }


def _by_index(worker_id: str) -> tuple[int, str]:
    index = worker_id.rpartition("-")[2]
    return (int(index) if index.isdecimal() else 0, worker_id)
