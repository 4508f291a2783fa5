"""Changes of a cluster that runs which are not to be: refused at admission where the API server has
CEL, and by the operator in a condition where it has none. Either way nothing of them is done."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.controller.kit.errors import StatusError
from deploy.controller.kit.objects import Key
from deploy.controller.resources import SERVING_CLUSTERS, WORKER_POOLS
from tests.k8s.api_clients import kube_of
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.operating import Operator, condition, eventually
from tests.k8s.test_crds import cluster

pytestmark = pytest.mark.usefixtures("crds", "ray_clusters")


class Site:
    """A namespace with ServingClusters of two pools each."""

    def __init__(self, control_plane: ControlPlane, namespace: str) -> None:
        self._control_plane, self._namespace = control_plane, namespace
        self._kube = kube_of(control_plane)

    def make(self, name: str, *pools: str) -> None:
        spec = {pool: {"role": pool.rpartition("-")[2]} for pool in pools}
        made = cluster(self._namespace, pools=spec)
        made["metadata"]["name"] = name
        self._control_plane.apply(made)

    def pool(self, name: str) -> dict[str, Any]:
        """The WorkerPool's spec; empty: there is none."""
        found: dict[str, Any] = self._kube.get(WORKER_POOLS, Key(self._namespace, name))["spec"]
        return found

    def edit(self, name: str, pool: str, **fields: Any) -> str:
        """What the API server says against it; empty: it is taken."""
        patch = {"spec": {"pools": {pool: fields}}}
        try:
            self._kube.merge_patch(SERVING_CLUSTERS, Key(self._namespace, name), patch)
        except StatusError as error:
            return error.message
        return ""

    def degraded(self, name: str, reason: str) -> str:
        """The condition's message, once it has that reason."""

        def told() -> str:
            found = condition(
                self._kube.get(SERVING_CLUSTERS, Key(self._namespace, name)), "Degraded"
            )
            return str(found["message"]) if found.get("reason") == reason else ""

        return str(eventually(told, f"{name} is Degraded as {reason}"))


@pytest.fixture
def site(control_plane: ControlPlane, namespace: str, operator: Operator) -> Site:
    made = Site(control_plane, namespace)
    made.make("main", "prefill", "decode")
    made.degraded("main", "Sound")
    return made


def test_a_pools_role_stays_and_another_one_is_refused_by_the_fields_name(site: Site) -> None:
    before = site.pool("main-decode")
    if said := site.edit("main", "decode", role="mixed"):
        assert "role" in said
    else:
        assert "spec.pools.decode.role cannot be changed" in site.degraded("main", "InvalidSpec")
        site.edit("main", "decode", role="decode")
        site.degraded("main", "Sound")
    assert site.pool("main-decode") == before


def test_bounds_that_leave_a_pools_size_out_are_refused_and_all_else_of_the_pool_with_them(
    site: Site,
) -> None:
    before = site.pool("main-decode")
    bounds = {"initialReplicas": 2, "minReplicas": 2}
    assert not site.edit("main", "decode", **bounds, drainTimeout="1m"), "no rule sees both sizes"
    assert "minReplicas" in site.degraded("main", "Refused")
    assert site.pool("main-decode") == before
    site.edit("main", "decode", minReplicas=1)
    site.degraded("main", "Sound")
    assert site.pool("main-decode") == before | {"minReplicas": 1, "drainTimeout": "1m"}


def test_of_two_clusters_with_one_pools_name_the_first_one_keeps_it(site: Site) -> None:
    site.make("one", "prefill", "two-decode")
    site.degraded("one", "Sound")
    before = site.pool("one-two-decode")
    site.make("one-two", "prefill", "decode")
    said = site.degraded("one-two", "InvalidSpec")
    assert "spec.pools.decode needs another name" in said
    assert "pool two-decode of ServingCluster one" in said
    assert site.pool("one-two-decode") == before
    site.degraded("one", "Sound")
