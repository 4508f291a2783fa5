"""The metrics of the operator and of what it looks after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from deploy.controller.kit.errors import UnreachableError
from deploy.controller.kit.objects import Key, Object
from deploy.controller.operator_metrics import OperatorMetrics

CLUSTER: dict[str, Any] = {
    "status": {
        "conditions": [
            {"type": "Available", "status": "True", "reason": "Serving"},
            {"type": "Degraded", "status": "False", "reason": "Sound"},
        ]
    }
}
POOL: dict[str, Any] = {
    "status": {
        "conditions": [{"type": "Progressing", "status": "False", "reason": "InvalidSpec"}],
        "draining": [{"worker": "decode-0"}, {"worker": "decode-1", "heldBy": "requests"}],
    }
}


class World:
    """What the metrics are read from."""

    def __init__(self) -> None:
        self.is_leading, self.cluster = True, {**CLUSTER}
        self.pools: dict[Key, Object] = {Key("ns", "decode"): POOL}
        resources: Mapping[str, Any] = {
            "ServingCluster": lambda: {Key("ns", "main"): self.cluster},
            "WorkerPool": lambda: self.pools,
        }
        self.metrics = OperatorMetrics(lambda: self.is_leading, lambda: 3, resources)

    def said(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)

    def condition(self, kind: str, name: str, type_: str, reason: str) -> float | None:
        labels = {"kind": kind, "resource_namespace": "ns", "resource": name}
        return self.said("baton_resource_condition", **labels, type=type_, reason=reason)

    def overdue(self) -> float | None:
        labels = {"kind": "WorkerPool", "resource_namespace": "ns", "resource": "decode"}
        return self.said("baton_resource_overdue_drains", **labels)


def test_who_leads_reports_each_condition_with_its_reason() -> None:
    world = World()
    assert world.said("baton_operator_is_leading") == 1
    assert world.said("baton_operator_queue_depth") == 3
    assert world.condition("ServingCluster", "main", "Available", "Serving") == 1
    assert world.condition("ServingCluster", "main", "Degraded", "Sound") == 0
    assert world.condition("WorkerPool", "decode", "Progressing", "InvalidSpec") == 0
    assert world.overdue() == 1


def test_a_pools_size_and_the_share_of_each_unit_are_reported() -> None:
    world, of = World(), {"namespace": "ns", "cluster": "main"}

    def said() -> list[float | None]:
        pool = of | {"pool": "decode", "role": "decode"}
        sizes = [world.said("baton_pool_replicas", **pool, state=it) for it in ("ready", "wanted")]
        return sizes + [world.said("baton_rollout_share", **of, unit=unit) for unit in "ab"]

    assert said() == [None] * 4, "nobody has looked at them yet"
    spec = {"cluster": "main", "pool": "decode", "role": "decode", "replicas": 8}
    pool: dict[str, Any] = {"metadata": {}, "spec": spec, "status": {"readyReplicas": 1}}
    world.pools, world.cluster = {Key("ns", "decode"): pool}, {"status": {"unit": "a"}}
    assert said() == [1, 8, 1, None]
    pool["metadata"]["deletionTimestamp"] = "now"
    world.cluster["status"]["rollout"] = {"shares": {"a": 90, "b": 10}}
    assert said() == [1, 0, 0.9, 0.1], "a pool that is deleted drains, and lacks nobody"


def test_what_is_so_no_more_is_reported_no_more() -> None:
    world = World()
    conditions = [{"type": "Progressing", "status": "True", "reason": "Starting"}]
    world.pools = {Key("ns", "decode"): {"status": {"conditions": conditions, "draining": []}}}
    assert world.condition("WorkerPool", "decode", "Progressing", "InvalidSpec") is None
    assert world.condition("WorkerPool", "decode", "Progressing", "Starting") == 1
    assert world.overdue() == 0
    world.pools = {Key("ns", "new"): {}}
    assert world.overdue() is None


def test_who_stands_by_reports_of_itself_alone() -> None:
    world = World()
    world.is_leading = False
    assert world.said("baton_operator_is_leading") == 0
    assert world.condition("ServingCluster", "main", "Available", "Serving") is None


def test_reconciles_are_counted_by_their_ends_and_timed() -> None:
    world = World()

    def reconcile(key: Key) -> float | None:
        if key.name == "main":
            return 5.0
        raise UnreachableError("away") if key.name == "away" else ValueError("a fault")

    counted = world.metrics.counted(reconcile)
    assert counted(Key("ns", "main")) == 5.0
    with pytest.raises(UnreachableError):
        counted(Key("ns", "away"))
    for _ in range(2):
        with pytest.raises(ValueError, match="a fault"):
            counted(Key("ns", "other"))
    ends = {"succeeded": 1, "refused": 1, "failed": 2}
    for end, count in ends.items():
        assert world.said("baton_operator_reconciles_total", end=end) == count
    assert world.said("baton_operator_reconcile_seconds_count") == 4
