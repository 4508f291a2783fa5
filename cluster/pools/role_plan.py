"""Which workers of a mixed pool act in one role alone. Pure.

Every worker of such a pool can do either, so a switch of roles is told to routers and takes no new
process: what runs on a worker ends there, what is new is placed by the roles in force.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Role(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(frozen=True)
class RolePlan:
    """How many act as prefill alone and as decode alone; the rest act as both."""

    prefill: int = 0
    decode: int = 0

    def leaves_both_roles(self, num_workers: int) -> bool:
        """Whether so many are enough for it, with one for each role at least."""
        is_enough = self.prefill + self.decode <= num_workers
        return is_enough and max(self.prefill, self.decode) < num_workers


def active_roles(plan: RolePlan, worker_ids: Sequence[str]) -> dict[str, Role]:
    """Of the workers of a mixed pool that take new requests.

    Prefill fills the lowest places and decode the highest, so that another split changes as few
    workers as it can. Where there are fewer than the plan splits, or it would leave one role to
    nobody, all act as both: a role must not be without a worker because some are missing.
    """
    if not plan.leaves_both_roles(len(worker_ids)):
        return dict.fromkeys(worker_ids, Role.MIXED)
    in_order = sorted(worker_ids, key=_place)
    first_decode = len(in_order) - plan.decode
    return {
        worker_id: Role.PREFILL
        if number < plan.prefill
        else Role.DECODE
        if number >= first_decode
        else Role.MIXED
        for number, worker_id in enumerate(in_order)
    }


def _place(worker_id: str) -> tuple[int, str]:
    index = worker_id.rpartition("-")[2]
    return (int(index) if index.isdecimal() else 0, worker_id)
