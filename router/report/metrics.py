"""A router process's Prometheus metrics, over all its units. docs/metrics.md lists them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from operator import add
from typing import Any

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from baton.config.router import MetricsConfig
from baton.errors import OverloadedError, UnavailableError
from router.report.ended_request import MISSED, EndedRequest
from router.report.tally import Buckets, Count, Family, Names

METRICS_EVERY_S = 1.0
SECONDS = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0),
    *(5.0, 10.0, 30.0, 60.0, 300.0),
)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_RATIOS = (0.25, 0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
TOKENS = tuple(4.0**power for power in range(10))

_OF_ALL = ("model", "tenant")
_REFUSALS = {OverloadedError.reason, UnavailableError.reason}
_VLLM = {
    "baton_ttft_seconds": ("time_to_first_token_seconds",),
    "baton_itl_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "baton_tpot_seconds": ("request_time_per_output_token_seconds",),
    "baton_e2e_seconds": ("e2e_request_latency_seconds",),
    "baton_queue_seconds": ("request_queue_time_seconds",),
    "baton_prefill_seconds": ("request_prefill_time_seconds",),
    "baton_decode_seconds": ("request_decode_time_seconds",),
    "baton_request_prompt_tokens": ("request_prompt_tokens",),
    "baton_request_output_tokens": ("request_generation_tokens",),
    "baton_prompt_tokens": ("prompt_tokens",),
    "baton_output_tokens": ("generation_tokens",),
    "baton_prefilled_prompt_tokens": ("prefix_cache_queries",),
    "baton_cached_prompt_tokens": ("prefix_cache_hits",),
    "baton_requests": ("request_success",),
}
"""Names of vLLM's that its users' dashboards ask for, without `vllm:`."""
_VLLM_LABELS = {"model": "model_name", "end": "finished_reason"}
_VLLM_ENDS = {"stop": "stop", "length": "length", "aborted": "abort"}


@dataclass(frozen=True)
class Gauges:
    """One unit's part of the gauges, now."""

    num_queued: int
    num_active: int
    num_index_blocks: int
    num_degraded: int
    worker_states: Sequence[str]
    """One for each worker."""
    unit: str = ""
    max_model_len: int | None = None
    kv_use: Mapping[str, float] = field(default_factory=dict)
    """Share of each worker's KV in use, where vLLM's names are wanted."""


class RouterMetrics(Collector):
    """Own the counters; `registry` has all metrics.

    Most have the labels model, tenant, and how the request ended or the pool that served it.
    """

    def __init__(self, model: str = "", config: MetricsConfig | None = None) -> None:
        config = config or MetricsConfig()
        self._model, self._has_vllm_names = model, config.vllm_names
        self._tenants, self._ignored_names = Names(config.tenants), Names(64)
        self.gauges: Sequence[Gauges] = ()
        """The units' routers' parts, as they were measured last."""
        self._families: list[Family[Count] | Family[Buckets]] = []
        self.registry = CollectorRegistry()
        traffic, by_end, by_pool = ((*_OF_ALL, *more) for more in ((), ("end",), ("pool",)))
        stage = ("model", "pool")
        counter, histogram = self._counter, self._histogram

        self.requests = counter("requests", "Requests by how they ended", by_end)
        self.goodput = counter(
            "goodput_requests",
            "Requests that met both targets for latency, or missed one",
            (*_OF_ALL, "result"),
        )
        self.targets = counter(
            "targets",
            "Targets that requests named, ttft and itl, by whether they were met",
            ("target", "result"),
        )
        self.failures = counter("attempt_failures", "Failed attempts by cause", ("failure",))
        self.migrations = counter("migrations", "Requests moved after a token", ()).labels()
        self.placements = counter("placements", "Attempts by where they prefill", ("prefill",))
        self._ignored = counter("ignored_fields", "Fields that nobody knows", ("field",))
        self.wasted = counter(
            "wasted_tokens",
            "Tokens computed again, or for a client that has gone",
            (*_OF_ALL, "cause"),
        )
        self.arrivals = counter("arrivals", "Requests that came in", traffic)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens taken in", traffic)
        self.prefilled_tokens = counter(
            "prefilled_prompt_tokens", "Prompt tokens prefilled or found cached", traffic
        )
        self.cached_tokens = counter(
            "cached_prompt_tokens", "Prompt tokens found cached where they ran", traffic
        )
        self.tokens = counter("output_tokens", "Tokens emitted", traffic)
        self.handoff_bytes = counter("handoff_bytes", "KV bytes handed off", ()).labels()

        self.ttft = histogram("ttft_seconds", "Time to first token", by_pool)
        self.ttft_ratio = histogram(
            "ttft_predicted_ratio",
            "Time from a placement to the first token, over what was predicted",
            stage,
            _RATIOS,
        )
        self.itl = histogram("itl_seconds", "Each gap between tokens", by_pool, GAPS)
        self.handoff = histogram("handoff_seconds", "Time of a handoff's puts", stage)
        self._of_end = {
            "e2e_s": histogram("e2e_seconds", "Whole request", by_end),
            "queue_s": histogram("queue_seconds", "Wait for a placement", by_end),
            "tokenize_s": histogram("tokenize_seconds", "Reading and tokenizing", by_end),
            "num_prompt_tokens": histogram(
                "request_prompt_tokens", "Length of a prompt", by_end, TOKENS
            ),
            "num_output_tokens": histogram(
                "request_output_tokens", "Length of an answer", by_end, TOKENS
            ),
        }
        self._of_prefill = {
            "prefill_queue_s": histogram("worker_queue_seconds", "Wait at the worker", stage),
            "prefill_s": histogram("prefill_seconds", "Prefill at the worker", stage),
        }
        self._of_decode = {
            "decode_s": histogram("decode_seconds", "From first to last token", stage),
        }
        self.tpot = histogram("tpot_seconds", "A request's mean gap", by_pool, GAPS)
        self.registry.register(self)

    def _counter(self, name: str, text: str, labels: Sequence[str]) -> Family[Count]:
        family = Family(f"baton_{name}", text, labels, Count)
        self._families.append(family)
        return family

    def _histogram(
        self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float] = SECONDS
    ) -> Family[Buckets]:
        family = Family(f"baton_{name}", text, labels, partial(Buckets, bounds))
        self._families.append(family)
        return family

    def of(self, tenant: str) -> tuple[str, str]:
        """Return the values of the labels model and tenant."""
        return self._model, self._tenants.of(tenant)

    def refused(self, tenant: str, end: str) -> None:
        """Count a request that no unit's router took in."""
        own = self.of(tenant)
        self.requests.labels(*own, end).inc()
        if end in _REFUSALS:
            self.goodput.labels(*own, MISSED).inc()

    def ended(self, ended: EndedRequest, prefill_pool: str, decode_pool: str) -> None:
        """Count a request at its end, once; a stage that did not happen is left out."""
        own = self.of(ended.tenant)
        self.requests.labels(*own, ended.outcome).inc()
        for name, family in self._of_end.items():
            family.labels(*own, ended.outcome).observe(getattr(ended, name))
        for pool, families in ((prefill_pool, self._of_prefill), (decode_pool, self._of_decode)):
            for name, family in families.items():
                if took_s := getattr(ended, name):
                    family.labels(self._model, pool).observe(took_s)
        if ended.tpot_s:
            self.tpot.labels(*own, decode_pool).observe(ended.tpot_s)

    def saw_ignored(self, fields: Sequence[str]) -> None:
        """Count fields that were ignored, the first 64 names apart."""
        for name in fields:
            self._ignored.labels(self._ignored_names.of(name)).inc()

    def totals(self) -> dict[str, list[float]]:
        """Return sums over all labels but results and places; of a histogram its counts, then its
        sum."""
        found: dict[str, list[float]] = {"arrivals": [0.0]}
        for family in self._families:
            for labels, child in family.children.items():
                name = family.name.removeprefix("baton_")
                if family in (self.goodput, self.placements):
                    name = f"{name}/{labels[-1]}"
                new = [child.value] if isinstance(child, Count) else [*child.counts, child.total]
                found[name] = [*map(add, found.get(name, repeat(0)), new)]
        return found

    # --- a scrape: in another thread ------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            yield family.collect()
        units = self.gauges
        num_queued = sum(each.num_queued for each in units)
        num_active = sum(each.num_active for each in units)
        yield _gauge("baton_queue_length", "Requests waiting for a placement", num_queued)
        yield _gauge("baton_active_requests", "Requests in this router", num_active)
        states = Counter(state for each in units for state in each.worker_states)
        text = "Workers by their state here"
        yield _gauge("baton_fleet_workers", text, states, ("state",))
        text, degraded = "Workers whose KV events have a gap", sum(u.num_degraded for u in units)
        yield _gauge("baton_prefix_index_degraded", text, degraded)
        blocks = sum(each.num_index_blocks for each in units)
        yield _gauge("baton_prefix_index_blocks", "Blocks in the index", blocks)
        info = {(self._model, each.unit, str(each.max_model_len or "")): 1.0 for each in units}
        text, labels = "Units of the model that is served", ("model", "unit", "max_model_len")
        yield _gauge("baton_model_info", text, info, labels)
        if self._has_vllm_names:
            yield from self._vllm(num_active - num_queued, num_queued)

    def _vllm(self, num_running: int, num_waiting: int) -> Iterator[Metric]:
        for family in self._families:
            for name in _VLLM.get(family.name, ()):
                metric = family.collect(f"vllm:{name}", _VLLM_LABELS)
                if family is self.requests:
                    ends = (each.labels["finished_reason"] for each in metric.samples)
                    metric.samples = [
                        each._replace(labels=each.labels | {"finished_reason": _VLLM_ENDS[end]})
                        for each, end in zip(metric.samples, ends)
                        if end in _VLLM_ENDS
                    ]
                yield metric
        of_model = ("model_name",)
        for name, value in (("running", num_running), ("waiting", num_waiting)):
            figure = {(self._model,): value}
            yield _gauge(f"vllm:num_requests_{name}", f"Requests {name}", figure, of_model)
        use = {(self._model, id_): use for unit in self.gauges for id_, use in unit.kv_use.items()}
        labels = (*of_model, "engine")
        yield _gauge("vllm:kv_cache_usage_perc", "Share of a worker's KV in use", use, labels)


def _gauge(name: str, text: str, values: Any, labels: Sequence[str] = ()) -> Metric:
    """`values`: a number, or one for each value of the labels."""
    gauge = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items() if labels else [((), values)]:
        gauge.add_metric((key,) if isinstance(key, str) else key, value)
    return gauge
