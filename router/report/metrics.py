"""A router process's Prometheus metrics, over all its units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge, Histogram

METRICS_EVERY_S = 1.0
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True)
class Gauges:
    """One unit's part of the gauges, now."""

    num_queued: int
    num_active: int
    num_index_blocks: int
    num_degraded: int
    worker_states: Sequence[str]
    """One for each worker."""


class RouterMetrics:
    """Own the registry and its instruments."""

    def __init__(self) -> None:
        r = self.registry = CollectorRegistry()
        counter, gauge = partial(prometheus_client.Counter, registry=r), partial(Gauge, registry=r)
        seconds = partial(Histogram, registry=r, buckets=SECONDS)
        self.requests = counter("baton_requests", "Requests by how they ended", ["end"])
        self.served = counter(
            "baton_served_requests", "Requests that workers got, by how they served them", ["end"]
        )
        self.targets = counter(
            "baton_targets",
            "Targets that requests named, ttft and itl, by whether they were met",
            ["target", "result"],
        )
        self.failures = counter("baton_attempt_failures", "Failed attempts by cause", ["failure"])
        self.migrations = counter("baton_migrations", "Requests moved after a token")
        self._ignored = counter("baton_ignored_fields", "Fields that nobody knows", ["field"])
        self._ignored_names = set[str]()
        self.tokens = counter("baton_output_tokens", "Tokens emitted")
        self.arrivals = counter("baton_arrivals", "Requests that came in")
        self.prompt_tokens = counter("baton_prompt_tokens", "Prompt tokens taken in")
        self.cached_tokens = counter(
            "baton_cached_prompt_tokens", "Prompt tokens found cached where they ran"
        )
        self.prefilled_tokens = counter(
            "baton_prefilled_prompt_tokens", "Prompt tokens prefilled or found cached"
        )
        self.handoff_bytes = counter("baton_handoff_bytes", "KV bytes handed off")
        self.queue = gauge("baton_queue_length", "Requests waiting for a placement")
        self.active = gauge("baton_active_requests", "Requests in this router")
        self.workers = gauge("baton_fleet_workers", "Workers by their state here", ["state"])
        self.degraded = gauge("baton_prefix_index_degraded", "Workers whose KV events have a gap")
        self.index_blocks = gauge("baton_prefix_index_blocks", "Blocks in the index")
        self.ttft = seconds("baton_ttft_seconds", "Time to first token")
        self.e2e = seconds("baton_e2e_seconds", "Whole request")
        self.queue_wait = seconds("baton_queue_seconds", "Wait for a placement")
        self.itl = seconds(
            "baton_itl_seconds",
            "Median gap between a request's tokens",
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
        )

    def saw_ignored(self, fields: Sequence[str]) -> None:
        """Count the first 64 names each."""
        for name in fields:
            if len(self._ignored_names) < 64:
                self._ignored_names.add(name)
            self._ignored.labels(name if name in self._ignored_names else "other").inc()

    def measure(self, gauges: Sequence[Gauges]) -> None:
        """Set the gauges to the sums over the units' routers."""
        self.queue.set(sum(each.num_queued for each in gauges))
        self.active.set(sum(each.num_active for each in gauges))
        self.index_blocks.set(sum(each.num_index_blocks for each in gauges))
        self.degraded.set(sum(each.num_degraded for each in gauges))
        self.workers.clear()
        states = Counter[str]()
        for each in gauges:
            states.update(each.worker_states)
        for state, count in states.items():
            self.workers.labels(state).set(count)
