"""What a router's figures cost: a token, a request's end, a scrape. `python -m bench.figures`

`counters` is what a gap adds: its bucket and sum. `emit` is all that a router does with a token
between the worker's message and the client's log, the counters included. The least of several
rounds: what other processes take is no cost of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from prometheus_client import generate_latest

from baton.clock import ManualClock
from baton.config.router import MetricsConfig
from bench.report import describe, markdown
from router.report.ended_request import EndedRequest
from router.report.metrics import RouterMetrics
from router.report.tally import Buckets
from tests.router.answers import ask_for
from tests.router.request_outputs import output_for

ROUNDS, NUM_TOKENS, NUM_REQUESTS = 25, 400, 2000
TENANTS, POOLS = MetricsConfig().tenants, 4
STEP_S = 0.02


def took_us(make: Callable[[], Callable[[], object]], num: int) -> float:
    """Time one of the `num` things that the work which `make` prepares does, in microseconds."""
    times = []
    for _ in range(ROUNDS):
        work = make()
        began_s = time.perf_counter()
        work()
        times.append((time.perf_counter() - began_s) / num * 1e6)
    return min(times)


def emitting(counts: bool) -> Callable[[], None]:
    clock = ManualClock(100.0)
    _, output = output_for(clock, ask_for("prompt", NUM_TOKENS + 1))
    if not counts:
        output._gap_buckets = _Nothing(())

    def emit() -> None:
        for _ in range(NUM_TOKENS):
            clock.advance(STEP_S)
            output.emit([97], [], None)

    return emit


class _Nothing(Buckets):
    def observe(self, value: float) -> None:
        pass


def end(metrics: RouterMetrics) -> None:
    known: dict[str, Any] = {"num_prompt_tokens": 500, "num_output_tokens": 90}
    known |= {"queue_s": 0.01, "prefill_queue_s": 0.001, "prefill_s": 0.05, "tokenize_s": 0.001}
    known |= {"decode_s": 1.9, "tpot_s": 0.02}
    for number in range(NUM_REQUESTS):
        tenant, pool = f"tenant-{number // POOLS % TENANTS}", f"pool-{number % POOLS}"
        ended = EndedRequest("id", tenant, "stop", 2.0, **known)
        metrics.ended(ended, pool, pool)
        for family in (metrics.itl, metrics.ttft):
            family.labels(*metrics.of(tenant), pool).observe(0.02)
        for family in (metrics.handoff, metrics.ttft_ratio):
            family.labels("model", pool).observe(0.02)


def main() -> None:
    metrics = RouterMetrics("model")
    gap = Buckets(metrics.itl.labels("model", "", "").bounds)

    def observe() -> None:
        for _ in range(100_000):
            gap.observe(STEP_S)

    rows = [("counters, us a token", took_us(lambda: observe, 100_000))]
    alike = {counts: took_us(partial(emitting, counts), NUM_TOKENS) for counts in (False, True)}
    rows += [("emit without them, us a token", alike[False]), ("emit, us a token", alike[True])]
    rows.append(("a request's end, us", took_us(lambda: partial(end, metrics), NUM_REQUESTS)))
    text = generate_latest(metrics.registry)
    rows.append(
        ("scrape, ms", took_us(lambda: partial(generate_latest, metrics.registry), 1) / 1e3)
    )
    rows.append((f"scrape of {TENANTS} tenants, {POOLS} pools, MB", len(text) / 1e6))
    print(
        describe("python -m bench.figures"),
        "",
        markdown(["", "cost"], [[name, f"{cost:.2f}"] for name, cost in rows]),
        sep="\n",
    )


if __name__ == "__main__":
    main()
