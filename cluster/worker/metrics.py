"""A worker's Prometheus metrics, read from its latest load when they are scraped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from baton.v1 import control_pb2, worker_pb2

_GAUGES = {
    "num_waiting": "Requests waiting for their first step",
    "num_running": "Requests in the running batch",
    "num_reserved": "Requests whose KV is on its way",
    "num_queued_tokens": "Prompt tokens that still have to be computed",
    "num_free_blocks": "KV blocks free or evictable",
    "num_blocks": "KV blocks",
    "num_quarantined_blocks": "KV blocks kept from use: a late writer or reader could touch them",
    "prefill_tokens_per_s": "Measured prefill rate",
    "decode_step_s": "Measured time of a decode step",
    "handoff_bytes_per_s": "Measured bandwidth of this worker's handoffs",
}


class WorkerCollector(Collector):
    """Turns load and progress into metrics with the worker's labels."""

    def __init__(
        self,
        worker_id: str,
        pool: str,
        load: Callable[[], worker_pb2.WorkerLoad],
        progress: Callable[[], control_pb2.StepProgress],
        num_orphans: Callable[[], int],
        num_quarantined_bytes: Callable[[], int],
    ) -> None:
        self._labels = (worker_id, pool)
        self._load = load
        self._progress = progress
        self._num_orphans = num_orphans
        self._num_quarantined_bytes = num_quarantined_bytes

    def collect(self) -> Iterator[Metric]:
        load = self._load()
        for name, text in _GAUGES.items():
            yield self._gauge(f"worker_{name}", text, getattr(load, name))
        progress = self._progress()
        yield self._gauge("worker_idle_s", "Seconds since the last step ended", progress.idle_s)
        orphans = self._num_orphans()
        yield self._gauge("worker_num_orphans", "Requests whose router is gone", orphans)
        yield self._gauge(
            "kv_quarantined_bytes",
            "KV memory kept from use, over all ranks: a late writer or reader could touch it",
            self._num_quarantined_bytes(),
        )
        steps = CounterMetricFamily("baton_worker_steps", "Engine steps", labels=("worker", "pool"))
        steps.add_metric(self._labels, progress.num_steps)
        yield steps

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(f"baton_{name}", text, labels=("worker", "pool"))
        gauge.add_metric(self._labels, value)
        return gauge

    @contextlib.contextmanager
    def served(self, host: str, port: int) -> Iterator[str]:
        """Yields the host:port that it is scraped at."""
        registry = CollectorRegistry()
        registry.register(self)
        server, thread = start_http_server(port, host.strip("[]"), registry=registry)
        try:
            yield f"{host}:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
