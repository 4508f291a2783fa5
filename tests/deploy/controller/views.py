"""Views of clusters for tests, as a look would find them."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from baton.fleet import Role
from deploy.api.naming import API_VERSION
from deploy.api.serving_cluster import ModelSource, ServingClusterSpec
from deploy.api.status import State
from deploy.api.worker_pool import PoolTemplate, Scaling, ScalingMode, WorkerPoolSpec
from deploy.controller.kit.objects import Key
from deploy.controller.manifests.common import POOL_LABEL, Owner
from deploy.controller.observed.fleet import NOTHING_HEARD, Fleet, FleetPool, Heard
from deploy.controller.observed.pod import Pod
from deploy.controller.observed.view import ClusterView, PoolView
from deploy.controller.rollout.rollout import Record, Step, UnitPlan
from tests.deploy.controller.clusters import OWNER, pools_of, spec_of

PLAN = UnitPlan("2x4bz", {}, Record())
SERVING = Step(State.SERVING, "it is", (PLAN,))


def pod(name: str, is_ready: bool = True, is_going: bool = False) -> Pod:
    metadata = {"name": name, "labels": {POOL_LABEL: "decode"}}
    if is_going:
        metadata["deletionTimestamp"] = "2030-01-01T00:00:00Z"
    conditions = [{"type": "Ready", "status": str(is_ready)}]
    now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    return Pod.of({"metadata": metadata, "status": {"conditions": conditions}}, now)


def view_of(pods: Sequence[Pod] = (), **spec: Any) -> ClusterView:
    """Two pools of two, the decode one with `pods`."""
    parsed = spec_of(**spec)
    pools = {
        name: PoolView(
            {"metadata": {"name": f"main-{name}", "uid": f"uid-of-{name}"}},
            pool,
            list(pods) if name == "decode" else [],
            None,
        )
        for name, pool in pools_of(parsed, replicas=2).items()
    }
    key = Key(OWNER.namespace, OWNER.name)
    return ClusterView(key, {"metadata": {}}, OWNER, parsed, pools, NOTHING_HEARD, SERVING)


def view_without_workers(replicas: int, mode: ScalingMode) -> ClusterView:
    """A cluster whose pools are to have so many workers, and have none."""
    pools = {
        name: PoolView(
            {"metadata": {}},
            WorkerPoolSpec(
                role=name, cluster="main", pool=name, replicas=replicas, scaling=Scaling(mode=mode)
            ),
            [],
            FleetPool(replicas, ()),
        )
        for name in (Role.PREFILL, Role.DECODE)
    }
    spec = ServingClusterSpec(
        model=ModelSource(name="a/model"),
        pools={name: PoolTemplate(role=name) for name in pools},
    )
    fleet = Fleet({name: pool.fleet for name, pool in pools.items() if pool.fleet})
    obj = {"apiVersion": API_VERSION, "kind": "ServingCluster", "metadata": {}}
    heard = Heard(fleet, is_certain=True)
    key, owner = Key("here", "main"), Owner("main", "here", "uid")
    return ClusterView(key, obj, owner, spec, pools, heard, SERVING)
