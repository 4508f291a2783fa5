"""Whether `baton diagnose` names the cause first, for each shape of traffic, on a real cluster.

One prefill and one decode worker of the fake engine, which takes the time of 2,000 prompt tokens/s
and 50 steps/s. Each run has a cluster of its own. `python -m bench.diagnose [SHAPE ...]`
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from baton.client import Client
from baton.config.cluster import ClusterConfig, parse_config
from bench.report import describe, markdown, progress
from cli.diagnose import asked
from cluster.local import bring_up as local
from cluster.worker.rank import free_port

RUNS, SECONDS, VOCAB = 5, 20.0, 2000
FAKE = {"vocab_size": VOCAB, "prefill_token_s": 5e-4, "decode_step_s": 0.02}
ENGINE = {"backend": "fake", "device": "cpu", "num_blocks": 4000, "max_num_seqs": 16, "fake": FAKE}


class Shape(NamedTuple):
    """`own`: lengths of prompts beside what all begin with, by client."""

    expected: str
    num_clients: int
    own: tuple[int, ...]
    num_answer: int
    num_shared: int = 0
    pause_s: float = 0.0
    """After all clients have asked once; 0: each goes on as soon as it has its answer."""


SHAPES = {
    "many short prompts": Shape("decode full", 48, (40,), 64),
    "few long prompts": Shape("long prompts", 1, (3000,), 8),
    "bursts on an idle baseline": Shape("bursts", 24, (128,), 8, pause_s=4.0),
    "one system prompt": Shape("none", 4, (16,), 16, num_shared=1024),
    "mixed contexts": Shape("long before short", 8, (3000, 40, 40, 40), 8),
}


def load(shape: Shape, address: str) -> None:
    rng, ends_s = np.random.default_rng(), time.monotonic() + SECONDS
    system = rng.integers(10, VOCAB, shape.num_shared).tolist()

    def ask(number: int) -> None:
        own = rng.integers(10, VOCAB, shape.own[number % len(shape.own)]).tolist()
        with Client(address) as client:
            events = client.generate(
                token_ids=system + own, max_tokens=shape.num_answer, ignore_eos=True
            )
            list(events)

    def go_on(number: int) -> None:
        while time.monotonic() < ends_s:
            ask(number)

    ask(-1)  # what is shared is cached from now on
    with ThreadPoolExecutor(shape.num_clients) as clients:
        while time.monotonic() < ends_s:
            list(clients.map(ask if shape.pause_s else go_on, range(shape.num_clients)))
            time.sleep(shape.pause_s)


def cluster_with(metrics_port: int) -> ClusterConfig:
    metrics = {"port": metrics_port, "ttft_target_s": 0.5}
    placement = {"local_prefill": "never"}
    router = {"port": 0, "http": {"port": None}, "metrics": metrics, "placement": placement}
    return parse_config({"engine": ENGINE, "router": router, "control": {"port": 0}})


def causes(shape: Shape) -> list[str]:
    """Those of one run, the likeliest first."""
    port = free_port("127.0.0.1")
    with local.up(cluster_with(port)) as cluster:
        load(shape, cluster.router_address)
        _, figures, findings = asked(f"127.0.0.1:{port}")
    for line in (*figures, *findings):
        progress(": ".join(line))
    return [cause for cause, *_ in findings] or ["none"]


def main() -> None:
    rows = []
    for name in sys.argv[1:] or SHAPES:
        found, expected = [causes(SHAPES[name]) for _ in range(RUNS)], SHAPES[name].expected
        right = f"{sum(first == expected for first, *_ in found)} of {RUNS}"
        rows.append([name, expected, right, "; ".join(map(", ".join, found))])
    print(describe(" ".join(("python -m bench.diagnose", *sys.argv[1:]))), __doc__, sep="\n\n")
    print(markdown(("traffic", "expected", "first", "causes of each run, ranked"), rows))


if __name__ == "__main__":
    main()
