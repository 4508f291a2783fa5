"""What a ServingCluster's conditions say of pools without a worker."""

from __future__ import annotations

import pytest

from deploy.api.model_source import ModelSource
from deploy.api.naming import API_VERSION
from deploy.api.serving_cluster import ServingClusterSpec
from deploy.api.worker_pool import PoolTemplate, Scaling, WorkerPoolSpec
from deploy.controller.cluster_status import availability
from deploy.controller.manifests.common import Owner
from deploy.controller.objects import Key
from deploy.controller.observed import Fleet, FleetPool
from deploy.controller.view import ClusterView, PoolView


def at(replicas: int, mode: str) -> ClusterView:
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
        for name in ("prefill", "decode")
    }
    spec = ServingClusterSpec(
        model=ModelSource(name="a/model"),
        pools={name: PoolTemplate(role=name) for name in pools},
    )
    fleet = Fleet({name: pool.fleet for name, pool in pools.items() if pool.fleet})
    obj = {"apiVersion": API_VERSION, "kind": "ServingCluster", "metadata": {}}
    return ClusterView(
        Key("here", "main"), obj, Owner("main", "here", "uid"), spec, pools, fleet, True
    )


@pytest.mark.parametrize(
    ("replicas", "mode", "status", "reason"),
    [
        (0, "planner", True, "Stopped"),
        (0, "manual", False, "Missing"),
        (1, "planner", False, "Missing"),
    ],
)
def test_pools_that_the_planner_stopped_are_available_for_the_next_request_starts_them(
    replicas: int, mode: str, status: bool, reason: str
) -> None:
    available = availability(at(replicas, mode), num_routers_ready=2)
    assert (available.type, available.is_true, available.reason) == ("Available", status, reason)
