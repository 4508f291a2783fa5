"""Fleets of a size, and what one request's way through an idle router's queue costs there."""

from __future__ import annotations

import asyncio
import random
import statistics
import time

import numpy as np

from baton.clock import LoopClock
from baton.config.router import RouterConfig
from baton.errors import BatonError
from baton.fleet import WorkerState
from baton.v1 import common_pb2
from kv_transfer.block_hash import HASH_BYTES, SHARED_BY_ALL
from router.fleet.fleet import Fleet
from router.fleet.worker_facts import WorkerFacts
from router.index.prefix_index import PrefixIndex
from router.placement.admission import Admission
from router.placement.ticket import Placed, PromptBlocks
from tests.router.scripted_worker import FINGERPRINT, MODEL

NUM_PLACEMENTS = 300


def fleet_of(size: int, index: PrefixIndex) -> Fleet:
    """Half prefill and half decode workers, each holding a thousand blocks of its own."""
    fleet = Fleet(time.monotonic, lambda: None)
    rng = random.Random(0)
    for number in range(size):
        facts = WorkerFacts(
            worker_id=f"w{number}",
            incarnation=1,
            can_prefill=number % 2 == 0,
            can_decode=number % 2 == 1,
            address="",
            model=MODEL,
            kv_fingerprint=FINGERPRINT,
            block_size=16,
            num_blocks=100_000,
            max_model_len=8192,
            max_request_tokens=0,
            max_held_tokens=0,
            max_num_seqs=256,
            kv_bytes_per_token=1 << 17,
            ref=common_pb2.WorkerRef(worker_id=f"w{number}"),
        )
        entry = fleet.add(facts)
        fleet.set_state(entry, WorkerState.LIVE)
        fleet.set_connected(entry, True)
        index.follow(entry.slot, b"", [(b"", rng.randbytes(1000 * HASH_BYTES))])
    return fleet


async def placement_us(size: int) -> float:
    """Median microseconds from the queue to a booked placement, and back."""
    config, index = RouterConfig(), PrefixIndex()
    fleet = fleet_of(size, index)
    admission = Admission(config, fleet, index, LoopClock(), random.Random(0))
    took = []
    rng = np.random.default_rng(0)
    for _ in range(NUM_PLACEMENTS):
        tokens = rng.integers(0, 256, 1024, dtype=np.uint32)
        prompt = PromptBlocks(tokens, SHARED_BY_ALL)
        prompt.hashes(FINGERPRINT, 16)
        start = time.perf_counter()
        answer: asyncio.Future[Placed | BatonError] = asyncio.get_running_loop().create_future()
        admission.enter(admission.ticket(prompt, 64), answer.set_result)
        placed = await answer
        assert isinstance(placed, Placed)
        took.append(time.perf_counter() - start)
        fleet.release(placed.booking)
    fleet.check_integrity()
    return statistics.median(took) * 1e6
