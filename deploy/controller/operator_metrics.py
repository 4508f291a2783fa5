"""The operator's metrics: its own work, and conditions, sizes and shares of each resource.

They are read from the cached objects at each scrape. Only the operator that leads reports
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from deploy.controller.kit.errors import KubeError
from deploy.controller.kit.objects import Key, Object

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_OF_CLUSTER = ("namespace", "cluster")  # a scrape has to keep it: `honor_labels`
_OF_RESOURCE = ("kind", "resource_namespace", "resource")
Reconcile = Callable[[Key], float | None]


class OperatorMetrics(Collector):
    """Own what is counted; `registry` has all of it."""

    def __init__(
        self,
        is_leading: Callable[[], bool],
        num_waiting: Callable[[], int],
        resources: Mapping[str, Callable[[], Mapping[Key, Object]]],
    ) -> None:
        """Read at each scrape. `num_waiting`: keys in the queue whose time has come; `resources`:
        all that there are, by kind."""
        self._is_leading, self._num_waiting, self._resources = is_leading, num_waiting, resources
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._ended = Counter(
            "baton_operator_reconciles",
            "Reconciles of a ServingCluster by how they ended; failed: by a fault of the operator",
            ("end",),
            registry=self.registry,
        )
        for end in ("succeeded", "refused", "failed"):
            self._ended.labels(end)
        self._seconds = Histogram(
            "baton_operator_reconcile_seconds",
            "Time of a reconcile",
            buckets=_SECONDS,
            registry=self.registry,
        )

    def counted(self, reconcile: Reconcile) -> Reconcile:
        """Return a reconcile that is counted and timed; it raises what it raised."""

        def counted(key: Key) -> float | None:
            began_at, end = time.monotonic(), "failed"
            try:
                again_after_s = reconcile(key)
                end = "succeeded"
            except KubeError:
                end = "refused"
                raise
            finally:
                self._ended.labels(end).inc()
                self._seconds.observe(time.monotonic() - began_at)
            return again_after_s

        return counted

    def collect(self) -> Iterator[Metric]:
        is_leading = self._is_leading()
        yield _gauge("operator_is_leading", "1 for the operator that acts", is_leading)
        waiting = self._num_waiting() if is_leading else 0
        yield _gauge("operator_queue_depth", "ServingClusters that wait to be reconciled", waiting)
        conditions = GaugeMetricFamily(
            "baton_resource_condition",
            "A condition of a ServingCluster or WorkerPool: 1 where it is True",
            labels=(*_OF_RESOURCE, "type", "reason"),
        )
        drains = GaugeMetricFamily(
            "baton_resource_overdue_drains",
            "Workers of a WorkerPool that drain for longer than its drainTimeout",
            labels=_OF_RESOURCE,
        )
        text, of_pool = "Workers of a pool that are wanted, or ready", ("pool", "role", "state")
        sizes = GaugeMetricFamily("baton_pool_replicas", text, labels=(*_OF_CLUSTER, *of_pool))
        text = "Share of the requests that a unit gets: 1 where it is alone"
        shares = GaugeMetricFamily("baton_rollout_share", text, labels=(*_OF_CLUSTER, "unit"))
        if is_leading:
            for kind, resources in self._resources.items():
                for key, obj in resources().items():
                    _add(conditions, drains, (kind, key.namespace, key.name), obj)
                    _add_figures(sizes, shares, key, obj)
        yield from (conditions, drains, sizes, shares)


def _add(
    conditions: GaugeMetricFamily, drains: GaugeMetricFamily, name: tuple[str, ...], obj: Object
) -> None:
    status = obj.get("status", {})
    for each in status.get("conditions") or ():
        is_true = each["status"] == "True"
        conditions.add_metric((*name, each["type"], each.get("reason", "")), is_true)
    if "draining" in status:
        drains.add_metric(name, sum("heldBy" in each for each in status["draining"] or ()))


def _add_figures(
    sizes: GaugeMetricFamily, shares: GaugeMetricFamily, key: Key, obj: Object
) -> None:
    """Add the figures of a WorkerPool or ServingCluster. A deleted pool wants no worker."""
    spec, status = obj.get("spec", {}), obj.get("status", {})
    if "pool" in spec and "readyReplicas" in status:
        name = (key.namespace, spec["cluster"], spec["pool"], spec["role"])
        wanted = 0 if "deletionTimestamp" in obj["metadata"] else spec.get("replicas", 1)
        sizes.add_metric((*name, "wanted"), wanted)
        sizes.add_metric((*name, "ready"), status["readyReplicas"])
    alone = {status["unit"]: 100} if status.get("unit") else {}
    for unit, percent in ((status.get("rollout") or {}).get("shares") or alone).items():
        shares.add_metric((key.namespace, key.name, unit), percent / 100)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"baton_{name}", text, value=float(value))
