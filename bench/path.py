"""Time to first token and gaps between tokens through the whole path: client, router, workers.

TTFT is what the client sees, `beyond prefill` what of it is not the same request's prefill. The
columns after it add up to TTFT, but for being medians each: tokenize and queue in the router,
reserve at the decode worker, the prefill worker's own queue, its prefill to the sampled token,
`rest`: messages between router and workers and their wake-ups, and `client`: between client and
router. On the local cluster the decode worker's queue and its messages are part of prefill.

Two clusters one after the other on this machine: disaggregated (one prefill, one decode worker)
and local (one decode worker, which prefills by itself). One request at a time, every prompt new, so
that no prefix is cached; medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from baton.client import Client
from baton.client.events import Finished, HandedOff, Tokens
from baton.config.cluster import ClusterConfig, ControlConfig, PoolConfig
from baton.config.engine import EngineConfig
from baton.config.router import RouterConfig
from baton.config.settings import changed
from baton.fleet import Role
from bench import random_model
from bench.report import markdown, progress
from cluster.local import bring_up as local

PROMPT_LENGTHS = (128, 512, 1024, 2000)  # the last one is prefilled in two chunks
NUM_TOKENS = 32
ROUNDS = 7
WARM_UPS = 2


@dataclass
class Sample:
    """One request, milliseconds; None where the path has no such stage."""

    ttft_ms: float
    second_token_ms: float
    itl_ms: float
    finished: Finished
    handed_off: HandedOff | None

    @property
    def beyond_prefill_ms(self) -> float:
        """What the path adds to the prefill of this very request."""
        return self.ttft_ms - self.finished.timings.prefill_ms

    @property
    def rest_ms(self) -> float:
        """What is left of the router's time to first token beside the stages it knows."""
        t = self.finished.timings
        stages_ms = t.tokenize_ms + t.queue_ms + t.reserve_ms + t.prefill_queue_ms + t.prefill_ms
        return t.ttft_ms - stages_ms


OF_REQUESTS: dict[str, Callable[[Sample], float]] = {
    "TTFT ms": lambda s: s.ttft_ms,
    "beyond prefill ms": lambda s: s.beyond_prefill_ms,
    "tokenize ms": lambda s: s.finished.timings.tokenize_ms,
    "queue ms": lambda s: s.finished.timings.queue_ms,
    "reserve ms": lambda s: s.finished.timings.reserve_ms,
    "prefill queue ms": lambda s: s.finished.timings.prefill_queue_ms,
    "prefill ms": lambda s: s.finished.timings.prefill_ms,
    "rest ms": lambda s: s.rest_ms,
    "client ms": lambda s: s.ttft_ms - s.finished.timings.ttft_ms,
    "2nd token ms": lambda s: s.second_token_ms,
    "ITL ms": lambda s: s.itl_ms,
}
OF_HANDOFFS: dict[str, Callable[[HandedOff], float]] = {
    "KV MiB": lambda h: h.kv_bytes / 2**20,
    "put ms": lambda h: h.put_ms,
    "exposed ms": lambda h: h.exposed_ms,
}
HEADER = ("cluster", *OF_REQUESTS, *OF_HANDOFFS)


@dataclass
class PathRow:
    """One prompt length on one cluster."""

    cluster: str
    prompt: int
    samples: list[Sample] = field(default_factory=list)

    def cells(self) -> list[str]:
        """Medians; "-" where nothing was handed off."""
        handoffs = [s.handed_off for s in self.samples if s.handed_off is not None]
        return [
            f"{self.cluster}, {self.prompt} tokens",
            *(_median(list(map(value, self.samples))) for value in OF_REQUESTS.values()),
            *(_median(list(map(value, handoffs))) for value in OF_HANDOFFS.values()),
        ]


def _median(values: list[float]) -> str:
    return f"{statistics.median(values):.2f}" if values else "-"


def request(client: Client, prompt: np.ndarray) -> Sample:
    """Send one prompt; times are the client's own."""
    times: list[float] = []
    finished: Finished | None = None
    handed_off: HandedOff | None = None
    start = time.perf_counter()
    events = client.generate(
        token_ids=prompt.tolist(), max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
    )
    for event in events:
        match event:
            case Tokens():
                times += [time.perf_counter()] * len(event.ids)
            case HandedOff():
                handed_off = event
            case Finished():
                finished = event
    assert finished is not None
    assert len(times) == NUM_TOKENS, len(times)
    gaps = np.diff(times) * 1e3
    return Sample(
        (times[0] - start) * 1e3, float(gaps[0]), float(np.median(gaps[1:])), finished, handed_off
    )


@contextmanager
def running(model: Path, name: str) -> Iterator[Client]:
    pools = CLUSTERS[name]
    config = ClusterConfig(
        model=str(model),
        pools=pools,
        engine=EngineConfig(device="cpu", max_num_batched_tokens=1024, max_model_len=2048),
        router=changed(
            RouterConfig(),
            port=0,
            http={"port": None},
            placement={"local_prefill": "never" if name == "disaggregated" else "always"},
        ),
        control=ControlConfig(port=0),
    )
    with (
        local.up(config, on_progress=progress) as cluster,
        Client(cluster.router_address) as client,
    ):
        yield client


CLUSTERS = {
    "disaggregated": {
        "prefill": PoolConfig(role=Role.PREFILL),
        "decode": PoolConfig(role=Role.DECODE),
    },
    "local": {"decode": PoolConfig(role=Role.DECODE)},
}


def measure(model: Path, vocab_size: int) -> list[PathRow]:
    rng = np.random.default_rng(0)
    rows: list[PathRow] = []
    for name in CLUSTERS:
        with running(model, name) as client:
            for length in PROMPT_LENGTHS:
                progress(f"{name}: {length} tokens")
                row = PathRow(name, length)
                for index in range(WARM_UPS + ROUNDS):
                    prompt = rng.integers(10, vocab_size, length, dtype=np.uint32)
                    sample = request(client, prompt)
                    assert (sample.handed_off is not None) == (name == "disaggregated")
                    if index >= WARM_UPS:
                        row.samples.append(sample)
                rows.append(row)
    return rows


def main() -> None:
    print(__doc__)
    for title, folder, vocab_size in (
        ("models/demo", Path(__file__).parent.parent / "models" / "demo", 2000),
        (
            "random Qwen3 0.1B",
            random_model.saved("0.1B"),
            random_model.SHAPES["0.1B"].vocab_size,
        ),
    ):
        rows = [row.cells() for row in measure(folder, vocab_size)]
        print(f"{title}\n\n{markdown(HEADER, rows)}\n")


if __name__ == "__main__":
    main()
