"""What one placement costs: the choice, a prompt's block hashes, the prefix index.

Each row alternates between two ways of one result, so that both meet the same moments of the
machine. Medians.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from baton.config.router import PlacementConfig
from bench.fleets import fleet_of
from bench.report import markdown, progress
from kv_transfer.block_hash import (
    HASH_BYTES,
    SHARED_BY_ALL,
    TokenIds,
    chain_hashes,
    chain_root,
)
from router.fleet.fleet_arrays import FleetArrays
from router.index.prefix_index import PrefixIndex
from router.placement.choice import choose, trusted_speeds
from router.placement.placement import PlacementQuery
from router.placement.placing import Placing
from router.placement.ticket import PromptBlocks, Ticket
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


def choice_us(fleet: FleetArrays, num_distinct: int) -> float:
    """The choice for a prompt of which decode workers hold so many different parts."""
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
    """`Placing.best`: look-up in the index and choice, for a prompt of 1,024 tokens that a decode
    worker holds in part."""
    config, index = PlacementConfig(), PrefixIndex()
    fleet = fleet_of(size, index)
    placing = Placing(config, fleet, index, random.Random(0))
    prompt = PromptBlocks(prompt_of(1024), SHARED_BY_ALL)
    index.follow(1, b"", [(b"", prompt.hashes(FINGERPRINT, 16)[: 32 * HASH_BYTES])])
    ticket = Ticket((0, 0.0, 0), prompt, 64, 64)
    reserved = np.zeros(fleet.num_slots, dtype=np.bool_)
    return median_us(lambda: placing.best(ticket, reserved, NOW_S))[0]


def choices() -> list[list[str]]:
    rows = []
    for size in FLEETS:
        fleet = fleet_of(size, PrefixIndex()).arrays
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


@dataclass
class Contender:
    """An index that is measured. `wanted` is the chain in the form that it takes."""

    name: str
    store: Callable[[int, bytes, bytes], None]
    """Worker, parent and packed hashes: one event."""
    events: Callable[[int, list[tuple[bytes, bytes]]], None]
    """One message of a worker."""
    lookup: Callable[[bytes], object]


def ours(name: str, index: PrefixIndex) -> Contender:
    def store(slot: int, parent: bytes, hashes: bytes) -> None:
        index.follow(slot, b"", [(parent, hashes)])

    def events(slot: int, stored: list[tuple[bytes, bytes]]) -> None:
        index.follow(slot, b"", stored)

    return Contender(name, store, events, lambda chain: index.lookup(chain, NUM_WORKERS, NOW_S))


def radix_tree() -> Contender | None:
    """Return ai-dynamo-runtime's tree, where it can be imported. It takes one event a call, as
    JSON, and 64-bit hashes; they are converted before the time is taken."""
    try:
        from dynamo._core import RadixTree  # type: ignore[import-not-found]
    except ImportError:
        return None
    tree = RadixTree()

    @functools.cache
    def numbers(packed: bytes) -> list[int]:
        return [h & 0x7FFF_FFFF_FFFF_FFFF for h in np.frombuffer(packed, np.uint64)[::2].tolist()]

    @functools.cache
    def event(parent: bytes, hashes: bytes) -> bytes:
        blocks = [{"block_hash": number, "tokens_hash": number} for number in numbers(hashes)]
        parent_hash = numbers(parent)[0] if parent else None
        stored = {"parent_hash": parent_hash, "blocks": blocks}
        return json.dumps({"event_id": 1, "data": {"stored": stored}, "dp_rank": 0}).encode()

    def events(slot: int, stored: list[tuple[bytes, bytes]]) -> None:
        for parent, hashes in stored:
            tree.apply_event(slot, event(parent, hashes))

    def lookup(chain: bytes) -> object:
        return tree.find_matches(numbers(chain)).scores

    def store(slot: int, parent: bytes, hashes: bytes) -> None:
        events(slot, [(parent, hashes)])

    return Contender("RadixTree of ai-dynamo-runtime", store, events, lookup)


def contenders() -> list[Contender]:
    tree = radix_tree()
    made = [ours("C++", PrefixIndex())]
    return made if tree is None else [*made, tree]


def chain_of(number: int, length: int) -> bytes:
    return random.Random(number).randbytes(length * HASH_BYTES)


def rate(seconds: Sequence[float]) -> str:
    return f"{EVENTS_A_MESSAGE / statistics.median(seconds) / 1e6:.3f}"


def indexes() -> list[list[str]]:
    """Look-ups among a million blocks, of a chain that 64 workers hold to 4 or to 64 different
    lengths, and events of one block each."""
    measured = contenders()
    few, many = chain_of(1, NUM_LOOKED_UP), chain_of(2, NUM_LOOKED_UP)
    own = NUM_BLOCKS // CHAIN // NUM_WORKERS  # chains of each worker, which grow
    ends = [chain_of(3 + number, CHAIN)[-HASH_BYTES:] for number in range(own * NUM_WORKERS)]
    messages = []
    for number in range(NUM_EVENTS // EVENTS_A_MESSAGE):
        slot, new = number % NUM_WORKERS, chain_of(10**6 + number, EVENTS_A_MESSAGE)
        blocks = [new[i : i + HASH_BYTES] for i in range(0, len(new), HASH_BYTES)]
        parents = [ends[slot + i % own * NUM_WORKERS] for i in range(EVENTS_A_MESSAGE)]
        messages.append((slot, list(zip(parents, blocks))))
    for each in measured:
        progress(f"filling {each.name}")
        for slot in range(NUM_WORKERS):
            each.store(slot, b"", few[: (slot % 4 + 1) * NUM_LOOKED_UP // 4 * HASH_BYTES])
            each.store(slot, b"", many[: (slot + 1) * NUM_LOOKED_UP // NUM_WORKERS * HASH_BYTES])
        for number in range(NUM_BLOCKS // CHAIN):
            each.store(number % NUM_WORKERS, b"", chain_of(3 + number, CHAIN))
    progress("looking up")
    few_us = median_us(*(functools.partial(each.lookup, few) for each in measured))
    many_us = median_us(*(functools.partial(each.lookup, many) for each in measured))
    took: list[list[float]] = [[] for _ in measured]  # a message; growing now and then is left out
    for each in measured:  # what a contender converts is ready
        each.events(*messages[0])
    for slot, stored in messages:
        for times, each in zip(took, measured):
            start = time.perf_counter()
            each.events(slot, stored)
            times.append(time.perf_counter() - start)
    return [
        [each.name, f"{few:.1f}", f"{many:.1f}", rate(times)]
        for each, few, many, times in zip(measured, few_us, many_us, took)
    ]


def hashes() -> list[list[str]]:
    """From a prompt of 16,384 tokens to the blocks of it that 64 workers hold."""
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
