"""What one placement costs: the choice, a prompt's block hashes, the prefix index.

Each row alternates between two ways of one result, so that both meet the same moments of the
machine. Medians.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import numpy as np

from baton.config.router import RouterConfig
from bench.report import markdown
from bench.router import fleet_of
from kv_transfer.block_hash import SHARED_BY_ALL, TokenIds
from router.placement.placement import (
    FleetArrays,
    PlacementQuery,
    choose,
    evaluate,
    terms_of,
)
from router.placement.placing import Placing
from router.placement.prefix_index import PrefixIndex
from router.placement.ticket import PromptBlocks, Ticket
from tests.router.scripted_worker import FINGERPRINT

ROUNDS = 200
FLEETS = (128, 1000)  # half of them decode
NOW_S = 1.0


def median_us(*ways: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Of each way, taken in turns."""
    took: list[list[float]] = [[] for _ in ways]
    for way in ways:
        way()
    for _ in range(rounds):
        for times, way in zip(took, ways):
            start = time.perf_counter()
            way()
            times.append(time.perf_counter() - start)
    return [statistics.median(times) * 1e6 for times in took]


# --- the choice -----------------------------------------------------------------------------------


def choice_us(fleet: FleetArrays, num_distinct: int) -> list[float]:
    """The choice, and looking at every pair, for a prompt of which decode workers hold so many
    different parts."""
    config, rng = RouterConfig(), random.Random(0)
    parts = np.random.default_rng(0).integers(0, num_distinct, len(fleet.names))
    query = PlacementQuery(6000, 64, 0, parts * 4096 // num_distinct)

    def every_pair() -> object:
        return evaluate(terms_of(query, fleet, config, NOW_S), fleet, config).argmin()

    return median_us(lambda: choose(query, fleet, config, NOW_S, rng), every_pair)


def prompt_of(num_tokens: int, seed: int = 0) -> TokenIds:
    return np.random.default_rng(seed).integers(0, 256, num_tokens, dtype=np.uint32)


def best_us(size: int) -> float:
    """`Placing.best`: look-up in the index and choice, for a prompt of 1,024 tokens that a decode
    worker holds in part."""
    config, index = RouterConfig(), PrefixIndex()
    fleet = fleet_of(size, config, index)
    placing = Placing(config, fleet, index, random.Random(0))
    prompt = PromptBlocks(prompt_of(1024), SHARED_BY_ALL)
    index.store(1, None, prompt.hashes(FINGERPRINT, 16)[:32])
    ticket = Ticket((0, 0.0, 0), prompt, 64, 64)
    reserved = np.zeros(fleet.num_slots, dtype=np.bool_)
    return median_us(lambda: placing.best(ticket, reserved, NOW_S))[0]


def choices() -> list[list[str]]:
    rows = []
    for size in FLEETS:
        fleet = fleet_of(size, RouterConfig(), PrefixIndex()).arrays
        for num_distinct in (1, 4, 16, size):
            chosen, looked = choice_us(fleet, num_distinct)
            half = f"{size // 2} x {size // 2}, {num_distinct} parts held"
            rows.append([half, f"{chosen:.0f}", f"{looked:.0f}"])
        rows.append([f"{size // 2} x {size // 2}, with look-up", f"{best_us(size):.0f}", ""])
    return rows


def report() -> str:
    return markdown(("placement", "choice, us", "every pair, us"), choices())


if __name__ == "__main__":
    print(f"{__doc__}\n{report()}")
