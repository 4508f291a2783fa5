"""Gaps between a stream's tokens while other prompts are prefilled, through the whole path.

Random prompts of 512 tokens, 64 tokens out, a number of requests at any time. `own step` is the
median gap of as many streams when nothing else runs. `p99 / own` is what prompts make of it.
TTFT and tokens/s (output tokens of all streams) say what that costs. Two workers share the machine;
each computes with an equal part of its cores.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from baton.client import Client
from baton.client.events import Tokens
from baton.config.cluster import ClusterConfig, ControlConfig, PoolConfig
from baton.config.engine import EngineConfig
from baton.config.router import RouterConfig
from baton.config.settings import changed
from baton.fleet import Role
from bench import random_model
from bench.report import markdown, progress
from cluster.local import bring_up as local

MODEL = "0.1B"
NUM_PROMPT_TOKENS = 512
NUM_TOKENS = 64
LAYOUTS = {
    "1 prefill + 1 decode": {
        "prefill": PoolConfig(role=Role.PREFILL),
        "decode": PoolConfig(role=Role.DECODE),
    },
    "2 mixed": {"mixed": PoolConfig(role=Role.MIXED, replicas=2)},
}
AT_ONCE = (1, 4, 16)
HEADER = (
    "layout", "at once", "TTFT p50 ms", "own step ms", "ITL p50 ms", "ITL p99 ms", "p99 / own",
    "longest gap ms", "tokens/s",
)  # fmt: skip


@dataclass
class Stream:
    """When a request began and each of its tokens came, seconds."""

    begin_s: float
    times_s: list[float]

    def gaps_s(self, since_s: float = 0.0, until_s: float = float("inf")) -> list[float]:
        times_s = [time_s for time_s in self.times_s if since_s <= time_s <= until_s]
        return [later - earlier for earlier, later in pairwise(times_s)]


class Requests:
    """Sends prompts that were never sent before."""

    def __init__(self, address: str, seed: int) -> None:
        self._address = address
        self._rng = np.random.default_rng(seed)
        self._lock = threading.Lock()

    def send(self, num_requests: int, at_once: int, num_tokens: int) -> list[Stream]:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(self._ask, [num_tokens] * num_requests))

    def _ask(self, num_tokens: int) -> Stream:
        vocab_size = random_model.SHAPES[MODEL].vocab_size
        with self._lock:
            prompt = self._rng.integers(10, vocab_size, NUM_PROMPT_TOKENS).tolist()
        with Client(self._address) as client:
            stream = Stream(time.perf_counter(), [])
            events = client.generate(
                token_ids=prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True
            )
            for event in events:
                if isinstance(event, Tokens):
                    stream.times_s += [time.perf_counter()] * len(event.ids)
        assert len(stream.times_s) == num_tokens, len(stream.times_s)
        return stream


@contextmanager
def running(layout: str, dtype: str) -> Iterator[str]:
    """Yields the router's address."""
    config = ClusterConfig(
        model=str(random_model.saved(MODEL)),
        pools=LAYOUTS[layout],
        engine=EngineConfig(device="cpu", dtype=dtype, max_model_len=2048),  # type: ignore[arg-type]
        router=changed(RouterConfig(), port=0, http={"port": None}),
        control=ControlConfig(port=0),
    )
    with local.up(config, on_progress=progress) as cluster:
        yield cluster.router_address


def own_step_s(requests: Requests, at_once: int) -> float:
    """Median gap while all streams run and no prompt is left."""
    streams = requests.send(at_once, at_once, NUM_TOKENS * (1 + at_once // 4))
    since_s = max(stream.times_s[1] for stream in streams)
    until_s = min(stream.times_s[-1] for stream in streams)
    gaps_s = [gap for stream in streams for gap in stream.gaps_s(since_s, until_s)]
    return float(np.median(gaps_s))


def measure(layout: str, dtype: str) -> Iterator[list[str]]:
    with running(layout, dtype) as address:
        requests = Requests(address, seed=1)
        requests.send(4, 2, NUM_TOKENS)  # rates are learned
        for at_once in AT_ONCE:
            progress(f"{layout}, {at_once} at once")
            own_s = own_step_s(requests, at_once)
            begin_s = time.perf_counter()
            streams = requests.send(max(8, 3 * at_once), at_once, NUM_TOKENS)
            wall_s = time.perf_counter() - begin_s
            gaps_s = [gap for stream in streams for gap in stream.gaps_s()]
            p50_s, p99_s = np.percentile(gaps_s, [50, 99])
            ttft_s = np.median([stream.times_s[0] - stream.begin_s for stream in streams])
            times_s = (ttft_s, own_s, p50_s, p99_s)
            yield [
                layout,
                str(at_once),
                *(f"{1e3 * time_s:.0f}" for time_s in times_s),
                f"{p99_s / own_s:.1f}",
                f"{1e3 * max(gaps_s):.0f}",
                f"{len(streams) * NUM_TOKENS / wall_s:.1f}",
            ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gaps", description=__doc__)
    parser.add_argument("--dtype", default="auto", help="of the engine (default: the CPU's)")
    parser.add_argument("--layout", choices=LAYOUTS, help="this one alone")
    options = parser.parse_args()
    layouts = [options.layout] if options.layout else list(LAYOUTS)
    rows = [row for layout in layouts for row in measure(layout, options.dtype)]
    print(f"{__doc__}\n{markdown(HEADER, rows)}")


if __name__ == "__main__":
    main()
