"""What one placement costs: the choice, a prompt's block hashes, the prefix index.

Works that are compared take turns, so that they meet the same moments of the machine. Medians.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable

import numpy as np

from baton.clock import ManualClock
from baton.config.router import PlacementConfig
from bench.report import markdown, progress
from kv_transfer.block_hash import (
    HASH_BYTES,
    SHARED_BY_ALL,
    TokenIds,
    chain_hashes,
    chain_root,
)
from router.fleet.fleet import Fleet
from router.fleet.fleet_arrays import FleetArrays
from router.index.prefix_index import PrefixIndex
from router.placement.choice import choose, trusted_speeds
from router.placement.placement import PlacementQuery
from router.placement.placing import Placing
from router.placement.ticket import PromptBlocks, Ticket
from tests.router.fleets import facts, fleet_of
from tests.router.scripted_worker import FINGERPRINT

ROUNDS = 200
FLEETS = (128, 1000)  # half of them decode
NOW_S = 1.0


def median_us(*ways: Callable[[], object]) -> list[float]:
    """Time each way, taken in turns, and return the medians."""
    took: list[list[float]] = [[] for _ in ways]
    for way in ways:
        way()
    for _ in range(ROUNDS):
        for times, way in zip(took, ways):
            start = time.perf_counter()
            way()
            times.append(time.perf_counter() - start)
    return [statistics.median(times) * 1e6 for times in took]


# --- the choice -----------------------------------------------------------------------------------


def fleet_that_holds(size: int, index: PrefixIndex) -> Fleet:
    """Half prefill and half decode workers, each holding a thousand blocks of its own."""
    kinds = ((f"w{number}", number % 2 == 0, number % 2 == 1) for number in range(size))
    workers = (facts(*k, num_blocks=100_000, kv_fingerprint=FINGERPRINT) for k in kinds)
    fleet = fleet_of(*workers, clock=ManualClock(NOW_S))
    rng = random.Random(0)
    for slot in range(size):
        index.follow(slot, b"", [(b"", rng.randbytes(1000 * HASH_BYTES))])
    return fleet


def choice_us(fleet: FleetArrays, num_distinct: int) -> float:
    """Time the choice for a prompt of which workers hold so many different parts."""
    rng = random.Random(0)
    parts = np.random.default_rng(0).integers(0, num_distinct, len(fleet.names))
    speeds = trusted_speeds(fleet, 0, 0.0)
    query = PlacementQuery(
        6000, 64, 0, parts * 4096 // num_distinct, *speeds, PlacementConfig(), NOW_S
    )

    def one_query() -> object:  # a query keeps what it has computed
        return choose(dataclasses.replace(query), fleet, rng)

    return median_us(one_query)[0]


def across_two_racks(fleet: FleetArrays) -> FleetArrays:
    """Make links from one half of the workers to the other slow."""
    size, rate = len(fleet.names), float(fleet.handoff_bytes_per_s[0])
    for writer in range(0, size, 2):
        for reader in range(1, size, 2):
            if (writer < size // 2) != (reader < size // 2):
                for _ in range(20):
                    fleet.links.observe(writer, reader, rate / 8, rate)
        fleet.links.compare(writer, rate)
    return fleet


def prompt_of(num_tokens: int, seed: int = 0) -> TokenIds:
    return np.random.default_rng(seed).integers(0, 256, num_tokens, dtype=np.uint32)


def best_us(size: int) -> float:
    """Time `Placing.best`: look-up in the index and choice, for a prompt of 1,024 tokens
    that a decode worker holds in part."""
    config, index = PlacementConfig(), PrefixIndex()
    fleet = fleet_that_holds(size, index)
    placing = Placing(config, fleet, index, random.Random(0))
    prompt = PromptBlocks(prompt_of(1024), SHARED_BY_ALL)
    index.follow(1, b"", [(b"", prompt.hashes(FINGERPRINT, 16)[: 32 * HASH_BYTES])])
    ticket = Ticket((0, 0.0, 0), prompt, 64, 64)
    reserved = np.zeros(fleet.num_slots, dtype=np.bool_)
    return median_us(lambda: placing.best(ticket, reserved, NOW_S))[0]


def choices() -> list[list[str]]:
    rows = []
    for size in FLEETS:
        fleet = fleet_that_holds(size, PrefixIndex()).arrays
        for num_distinct in (1, 4, 16, size):
            half = f"{size // 2} x {size // 2}, {num_distinct} parts held"
            rows.append([half, f"{choice_us(fleet, num_distinct):.0f}"])
        racks_us = choice_us(across_two_racks(fleet), 4)
        rows.append([f"{size // 2} x {size // 2}, two racks", f"{racks_us:.0f}"])
        rows.append([f"{size // 2} x {size // 2}, with look-up", f"{best_us(size):.0f}"])
    return rows


# --- hashes and index -----------------------------------------------------------------------------

NUM_WORKERS, NUM_BLOCKS, NUM_LOOKED_UP = 64, 1_000_000, 1024
NUM_EVENTS, EVENTS_A_MESSAGE = 64_000, 64
CHAIN = 1000  # blocks of each prompt that fills the index


def chain_of(number: int, length: int) -> bytes:
    return random.Random(number).randbytes(length * HASH_BYTES)


def indexes() -> list[list[str]]:
    """Time look-ups among a million blocks, of a chain that 64 workers hold to 4 or to 64 different
    lengths, and events of one block each."""
    index = PrefixIndex()
    few, many = chain_of(1, NUM_LOOKED_UP), chain_of(2, NUM_LOOKED_UP)
    own = NUM_BLOCKS // CHAIN // NUM_WORKERS  # chains of each worker, which grow
    ends = [chain_of(3 + number, CHAIN)[-HASH_BYTES:] for number in range(own * NUM_WORKERS)]
    messages = []
    for number in range(NUM_EVENTS // EVENTS_A_MESSAGE):
        slot, new = number % NUM_WORKERS, chain_of(10**6 + number, EVENTS_A_MESSAGE)
        blocks = [new[i : i + HASH_BYTES] for i in range(0, len(new), HASH_BYTES)]
        parents = [ends[slot + i % own * NUM_WORKERS] for i in range(EVENTS_A_MESSAGE)]
        messages.append((slot, list(zip(parents, blocks))))
    progress("filling the index")
    for slot in range(NUM_WORKERS):
        held = few[: (slot % 4 + 1) * NUM_LOOKED_UP // 4 * HASH_BYTES]
        more = many[: (slot + 1) * NUM_LOOKED_UP // NUM_WORKERS * HASH_BYTES]
        index.follow(slot, b"", [(b"", held), (b"", more)])
    for number in range(NUM_BLOCKS // CHAIN):
        index.follow(number % NUM_WORKERS, b"", [(b"", chain_of(3 + number, CHAIN))])
    progress("looking up")
    few_us, many_us = median_us(
        lambda: index.lookup(few, NUM_WORKERS, NOW_S),
        lambda: index.lookup(many, NUM_WORKERS, NOW_S),
    )
    took = []  # of each message; growing now and then is left out
    for slot, stored in messages:
        start = time.perf_counter()
        index.follow(slot, b"", stored)
        took.append(time.perf_counter() - start)
    rate = EVENTS_A_MESSAGE / statistics.median(took) / 1e6
    return [["C++", f"{few_us:.1f}", f"{many_us:.1f}", f"{rate:.3f}"]]


def hashes() -> list[list[str]]:
    """Time the way from a prompt of 16,384 tokens to the blocks of it that 64 workers hold."""
    tokens, index = prompt_of(16_384), PrefixIndex()
    prompt = PromptBlocks(tokens, SHARED_BY_ALL).hashes(FINGERPRINT, 16)
    for slot in range(NUM_WORKERS):
        held = prompt[: (slot % 4 + 1) * NUM_LOOKED_UP // 4 * HASH_BYTES]
        index.follow(slot, b"", [(b"", held)])
    root = chain_root(FINGERPRINT)

    def to_scores() -> object:
        packed = PromptBlocks(tokens, SHARED_BY_ALL).hashes(FINGERPRINT, 16)
        return index.lookup(packed, NUM_WORKERS, NOW_S)

    took = median_us(
        lambda: chain_hashes(root, SHARED_BY_ALL, tokens, 16),
        to_scores,
    )
    names = ("hashes", "prompt to scores")
    return [[name, f"{us:.0f}"] for name, us in zip(names, took)]


def report() -> str:
    return "\n\n".join(
        (
            markdown(("placement", "us"), choices()),
            markdown(("16,384 tokens, blocks of 16", "us"), hashes()),
            markdown(
                (
                    f"{NUM_WORKERS} workers, {NUM_BLOCKS:,} blocks",
                    f"look-up of {NUM_LOOKED_UP} blocks, 4 lengths, us",
                    "64 lengths, us",
                    "one-block events, millions/s",
                ),
                indexes(),
            ),
        )
    )


if __name__ == "__main__":
    print(f"{__doc__}\n{report()}")
