"""Fleets without a network, and the queue in front of one."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
from typing import Any

import numpy as np

from baton.clock import ManualClock
from baton.config.router import PlacementConfig, RouterConfig
from baton.config.settings import changed
from baton.errors import BatonError
from baton.fleet import WorkerState
from baton.v1 import common_pb2
from kv_transfer.block_hash import SHARED_BY_ALL
from router.fleet.fleet import Fleet, WorkerEntry
from router.fleet.worker_facts import WorkerFacts
from router.index.prefix_index import PrefixIndex
from router.placement.admission import Admission
from router.placement.choice import choose, trusted_speeds
from router.placement.placement import Placement, PlacementQuery
from router.placement.ticket import Placed, PromptBlocks, Ticket

POLICY = PlacementConfig()


def facts(worker_id: str, prefill: bool, decode: bool, **changes: object) -> WorkerFacts:
    made = WorkerFacts(
        worker_id=worker_id,
        incarnation=1,
        can_prefill=prefill,
        can_decode=decode,
        address="127.0.0.1:1",
        model="tiny",
        kv_fingerprint=b"f",
        block_size=16,
        num_blocks=1000,
        max_model_len=8192,
        max_request_tokens=0,
        max_held_tokens=0,
        max_num_seqs=32,
        kv_bytes_per_token=1 << 16,
        ref=common_pb2.WorkerRef(worker_id=worker_id),
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def fleet_of(*members: WorkerFacts, clock: ManualClock | None = None) -> Fleet:
    fleet = Fleet((clock or ManualClock(100.0)).now_s, lambda: None)
    for member in members:
        entry = fleet.add(member)
        fleet.set_state(entry, WorkerState.LIVE)
        fleet.set_connected(entry, True)
    return fleet


def two_and_two(clock: ManualClock | None = None) -> Fleet:
    return fleet_of(
        facts("p0", True, False),
        facts("p1", True, False),
        facts("d0", False, True),
        facts("d1", False, True),
        clock=clock,
    )


def query(
    fleet: Fleet, num_tokens: int, *, explores: bool = False, now_s: float = 100.0, **cached: int
) -> PlacementQuery:
    tokens = np.zeros(fleet.num_slots, dtype=np.int64)
    for worker_id, count in cached.items():
        entry = entry_of(fleet, worker_id)
        tokens[entry.slot] = count
    since_s = now_s - POLICY.trust_rates_s if explores else -math.inf
    speeds = trusted_speeds(fleet.arrays, 0, since_s)
    return PlacementQuery(num_tokens, 16, 0, tokens, *speeds, POLICY, now_s, explores=explores)


def cheapest(fleet: Fleet, wanted: PlacementQuery, policy: PlacementConfig = POLICY) -> Placement:
    wanted = dataclasses.replace(wanted, policy=policy)
    placement = choose(wanted, fleet.arrays, random.Random(0))
    assert placement is not None
    return placement


def pick(fleet: Fleet, wanted: PlacementQuery, policy: PlacementConfig = POLICY) -> tuple[str, str]:
    placement = cheapest(fleet, wanted, policy)
    return placement.prefill_worker, placement.decode_worker


def prompt(num_tokens: int, first: int = 0) -> PromptBlocks:
    return PromptBlocks(np.arange(first, first + num_tokens, dtype=np.uint32), SHARED_BY_ALL)


def admission_of(fleet: Fleet, clock: ManualClock, **changes: object) -> Admission:
    usual = {"placement": {"local_prefill": "never"}, "admission": {"lease_lead_s": 0.5}}
    config = changed(changed(RouterConfig(), **usual), **changes)
    return Admission(config, fleet, PrefixIndex(), clock, random.Random(0))


def in_line(admission: Admission, *ticket: Any, **named: Any) -> asyncio.Task[Placed]:
    """A request in line; `ticket` is what `Admission.ticket` takes."""
    return asyncio.create_task(place(admission, admission.ticket(*ticket, **named)))


async def place(admission: Admission, ticket: Ticket) -> Placed:
    """Wait in line, as a request does. Raises what the line answers."""
    placed: asyncio.Future[Placed] = asyncio.get_running_loop().create_future()

    def answer(result: Placed | BatonError) -> None:
        if isinstance(result, BatonError):
            placed.set_exception(result)
        else:
            placed.set_result(result)

    admission.enter(ticket, answer)
    try:
        return await placed
    except asyncio.CancelledError:
        admission.leave(ticket)
        raise


async def rounds(admission: Admission, clock: ManualClock, seconds: float) -> None:
    """Let a time pass in which rounds are held, as they would be."""
    for _ in range(round(seconds / 0.25)):
        admission.kick()
        clock.advance(0.25)
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # who was placed knows it


def entry_of(fleet: Fleet, worker_id: str) -> WorkerEntry:
    entry = fleet.get(worker_id)
    assert entry is not None
    return entry
