"""What a router tells Prometheus; one registry per router, so that several fit in a process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from router.figures import Counts
from router.output import FinishReason

_WHOLE = (FinishReason.STOP.value, FinishReason.LENGTH.value)
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class RouterMetrics:
    """Own the registry and its instruments."""

    def __init__(self) -> None:
        r = self.registry = CollectorRegistry()
        self.requests = Counter("baton_requests", "Requests by how they ended", ["end"], registry=r)
        self.cohort_requests = Counter(
            "baton_cohort_requests",
            "Requests by where they ran, and how they were served there",
            ["cohort", "end"],
            registry=r,
        )
        self.failures = Counter(
            "baton_attempt_failures", "Failed attempts by cause", ["failure"], registry=r
        )
        self.migrations = Counter("baton_migrations", "Requests moved after a token", registry=r)
        self.tokens = Counter("baton_output_tokens", "Tokens emitted", registry=r)
        self.arrivals = Counter("baton_arrivals", "Requests that came in", registry=r)
        self.prompt_tokens = Counter("baton_prompt_tokens", "Prompt tokens taken in", registry=r)
        self.cached_tokens = Counter(
            "baton_cached_prompt_tokens", "Prompt tokens found cached where they ran", registry=r
        )
        self.prefilled_tokens = Counter(
            "baton_prefilled_prompt_tokens", "Prompt tokens prefilled or found cached", registry=r
        )
        self.handoff_bytes = Counter("baton_handoff_bytes", "KV bytes handed off", registry=r)
        self.queue = Gauge("baton_queue_length", "Requests waiting for a placement", registry=r)
        self.active = Gauge("baton_active_requests", "Requests in this router", registry=r)
        self.workers = Gauge(
            "baton_fleet_workers", "Workers by their state here", ["state"], registry=r
        )
        self.degraded = Gauge(
            "baton_prefix_index_degraded", "Workers whose KV events have a gap", registry=r
        )
        self.index_blocks = Gauge("baton_prefix_index_blocks", "Blocks in the index", registry=r)
        self.ttft = Histogram(
            "baton_ttft_seconds", "Time to first token", buckets=SECONDS, registry=r
        )
        self.e2e = Histogram("baton_e2e_seconds", "Whole request", buckets=SECONDS, registry=r)
        self.queue_wait = Histogram(
            "baton_queue_seconds", "Wait for a placement", buckets=SECONDS, registry=r
        )
        self.itl = Histogram(
            "baton_itl_seconds",
            "Median gap between a request's tokens",
            registry=r,
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
        )

    def counts(self) -> Counts:
        """What planning goes by."""
        ended = sum(self._value("baton_requests", end=end) for end in _WHOLE)
        return Counts(
            num_arrivals=self._value("baton_arrivals"),
            prompt_tokens=self._value("baton_prompt_tokens"),
            prefilled_tokens=self._value("baton_prefilled_prompt_tokens"),
            cached_tokens=self._value("baton_cached_prompt_tokens"),
            num_ended=ended,
            output_tokens=self._value("baton_output_tokens"),
        )

    def _value(self, counter: str, **labels: str) -> int:
        return int(self.registry.get_sample_value(f"{counter}_total", labels) or 0)
