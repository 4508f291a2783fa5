"""The operator on a real API server, where nothing runs the pods: what it writes, and what it does
not touch."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from baton.config.cluster import load_config, read_config
from deploy.controller.kit.finalizers import FINALIZER
from deploy.controller.kit.objects import Key
from deploy.controller.manifests.common import UNIT_LABEL
from deploy.controller.resources import SERVING_CLUSTERS
from tests.k8s.api_clients import kube_of
from tests.k8s.control_plane.errors import CommandError
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.operating import Operator, condition, eventually, operator_of
from tests.k8s.test_crds import BAD_FIELD, BAD_ROUTER, cluster
from tests.k8s.units import group_sizes_in, unit_of, units_of

pytestmark = pytest.mark.usefixtures("crds", "ray_clusters")

CLUSTER_FILE = """
model: org/name
served_model_name: chat
engine: {backend: fake, max_num_seqs: 32}
router: {max_queue: 7}
pools:
  prefill: {role: prefill}
  decode: {role: decode, replicas: 3, max_replicas: 5, engine: {max_num_seqs: 8}}
"""


class Seen:
    """What is in one namespace."""

    def __init__(self, control_plane: ControlPlane, namespace: str) -> None:
        self._control_plane, self._namespace = control_plane, namespace

    def __call__(self, what: str) -> dict[str, Any] | None:
        """`kind/name`; None: there is none."""
        try:
            found: dict[str, Any] = self._control_plane.read(what, "-n", self._namespace)
        except CommandError as error:
            if "NotFound" in str(error):
                return None
            raise
        return found

    def unit(self) -> dict[str, Any] | None:
        """The RayCluster of `main`."""
        return unit_of(self._control_plane, self._namespace, "main")

    def units(self) -> list[dict[str, Any]]:
        return units_of(self._control_plane, self._namespace, "main")

    def unit_soon(self) -> dict[str, Any]:
        found: dict[str, Any] = eventually(self.unit, "a unit")
        return found

    def soon(self, what: str) -> dict[str, Any]:
        found: dict[str, Any] = eventually(lambda: self(what), what)
        return found


@pytest.fixture
def seen(control_plane: ControlPlane, namespace: str) -> Seen:
    return Seen(control_plane, namespace)


def group_sizes(seen: Seen) -> dict[str, int]:
    """Of the RayCluster's worker groups, by pool."""
    return group_sizes_in(seen.unit_soon())


def test_a_cluster_gets_its_pools_its_ray_cluster_and_its_routers(
    control_plane: ControlPlane, namespace: str, operator: Operator, seen: Seen
) -> None:
    control_plane.apply(cluster(namespace, pools={
        "prefill": {"role": "prefill"},
        "decode": {"role": "decode", "initialReplicas": 3},
    }))  # fmt: skip
    assert group_sizes(seen) == {"prefill": 1, "decode": 3}
    assert seen.soon("deployment/main-router")["spec"]["replicas"] == 2
    assert seen.soon("service/main-router")
    pool = seen.soon("wp/main-decode")
    assert pool["spec"]["replicas"] == 3
    (owner,) = pool["metadata"]["ownerReferences"]
    assert owner["kind"] == "ServingCluster"
    told = eventually(
        lambda: condition(seen.soon("servingcluster/main"), "Available"), "a condition"
    )
    silent = "Ray's head is starting; Ray's head has no pod"
    assert (told["status"], told["message"]) == ("False", silent)
    code = seen.unit_soon()["metadata"]["labels"][UNIT_LABEL]
    assert seen.unit_soon()["metadata"]["name"] == f"main-{code}"
    assert seen.soon(f"configmap/main-{code}")["metadata"]["labels"][UNIT_LABEL] == code
    assert seen.soon("service/main-control")["spec"]["selector"][UNIT_LABEL] == code
    unit = lambda: seen.soon("servingcluster/main")["status"].get("unit")  # noqa: E731
    eventually(lambda: unit() == code, "the unit is told")


@pytest.mark.full
def test_a_pools_size_is_whoever_scales_its_and_never_the_operators(
    control_plane: ControlPlane, namespace: str, operator: Operator, seen: Seen
) -> None:
    control_plane.apply(cluster(namespace))
    seen.soon("wp/main-decode")
    control_plane.kubectl("-n", namespace, "scale", "wp/main-decode", "--replicas=4")
    eventually(lambda: group_sizes(seen)["decode"] == 4, "four decode pods are asked for")
    control_plane.apply(cluster(namespace, advanced={"router": {"maxQueue": 7}}))
    config = lambda: seen.soon("configmap/main-config")["data"]["cluster.yaml"]  # noqa: E731
    eventually(lambda: "max_queue: 7" in config(), "the change is taken over")
    pool = seen.soon("wp/main-decode")
    assert pool["spec"]["replicas"] == 4
    managers = [m for m in pool["metadata"]["managedFields"] if m["operation"] == "Apply"]
    assert managers
    assert all("f:replicas" not in m["fieldsV1"].get("f:spec", {}) for m in managers)


@pytest.mark.full
def test_a_model_that_was_available_leaves_its_name_to_the_next_one(
    control_plane: ControlPlane, namespace: str, operator: Operator, seen: Seen
) -> None:
    control_plane.apply(cluster(namespace))
    config = lambda: seen.soon("configmap/main-config")["data"]["cluster.yaml"]  # noqa: E731
    assert "served_model_name: demo" in config()
    served = {"status": {"model": "demo"}}
    kube_of(control_plane).merge_patch(SERVING_CLUSTERS, Key(namespace, "main"), served, "status")
    control_plane.apply(cluster(namespace, model={"name": "models/other"}))
    eventually(lambda: "model: models/other" in config(), "the change is taken over")
    assert "served_model_name: demo" in config()


def test_what_baton_deploy_prints_is_taken_by_kubectl_and_becomes_the_cluster_of_the_file(
    control_plane: ControlPlane, namespace: str, operator: Operator, seen: Seen, tmp_path: Path
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER_FILE)
    command = [sys.executable, "-m", "cli.main", "deploy", "-f", str(path)]
    done = subprocess.run(
        [*command, "--name", "main", "-n", namespace], capture_output=True, text=True, check=True
    )
    control_plane.kubectl("apply", "-f", "-", stdin=done.stdout)
    assert group_sizes(seen) == {"prefill": 1, "decode": 3}
    pool = seen.soon("wp/main-decode")["spec"]
    assert (pool["maxReplicas"], pool["engine"]) == (5, {"maxNumSeqs": 8})
    made = read_config(seen.soon("configmap/main-config")["data"]["cluster.yaml"], source="made")
    config = load_config(path)
    assert (made.model, made.model_name) == (config.model, config.model_name)
    assert made.engine == config.engine
    assert made.router.max_queue == config.router.max_queue == 7


def test_a_bad_cluster_is_told_so_and_another_one_is_served_all_the_same(
    control_plane: ControlPlane, namespace: str, operator: Operator, seen: Seen
) -> None:
    bad = cluster(namespace, router=BAD_ROUTER)
    bad["metadata"]["name"] = "bad"
    control_plane.apply(bad, cluster(namespace))
    told = eventually(
        lambda: condition(seen.soon("servingcluster/bad"), "Degraded"), "the bad one is told"
    )
    assert told["reason"] == "InvalidSpec"
    assert f"{BAD_FIELD}: must be a mapping" in told["message"]
    assert seen.unit_soon()
    assert unit_of(control_plane, namespace, "bad") is None


@pytest.mark.parametrize("strategy", ["Recreate", "RollingUpdate"])
def test_another_image_of_the_workers_makes_another_unit(
    control_plane: ControlPlane, namespace: str, operator: Operator, seen: Seen, strategy: str
) -> None:
    rollout = {"strategy": strategy}
    control_plane.apply(cluster(namespace, images={"worker": "baton:nowhere"}, rollout=rollout))
    first = seen.unit_soon()["metadata"]["name"]
    control_plane.apply(cluster(namespace, images={"worker": "baton:here"}, rollout=rollout))

    def is_made() -> dict[str, Any] | None:
        units = {each["metadata"]["name"]: each for each in seen.units()}
        expected = 1 if strategy == "Recreate" else 2
        others = [unit for name, unit in units.items() if name != first]
        return others[0] if len(units) == expected and others else None

    made = eventually(is_made, "another unit", 60)
    (container,) = made["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert container["image"] == "baton:here"
    leads = made["metadata"]["name"] if strategy == "Recreate" else first
    service = lambda: seen.soon("service/main-control")["spec"]["selector"]  # noqa: E731
    eventually(lambda: leads.endswith(service()[UNIT_LABEL]), "routers ask its head")


@pytest.mark.full
def test_a_deleted_cluster_goes_with_all_it_had(
    control_plane: ControlPlane, namespace: str, operator: Operator, seen: Seen
) -> None:
    control_plane.apply(cluster(namespace))
    seen.soon("service/main-router")
    assert FINALIZER in seen.soon("wp/main-decode")["metadata"]["finalizers"]
    control_plane.kubectl("-n", namespace, "delete", "servingcluster/main", "--wait=false")
    eventually(lambda: seen("servingcluster/main") is None, "the cluster is gone")
    eventually(lambda: seen("wp/main-decode") is None, "its pools are gone")


@pytest.mark.full
def test_a_pool_that_the_spec_names_no_more_is_deleted(
    control_plane: ControlPlane, namespace: str, operator: Operator, seen: Seen
) -> None:
    pools = {"decode": {"role": "decode"}, "more": {"role": "decode"}}
    control_plane.apply(cluster(namespace, pools=pools))
    seen.soon("wp/main-more")
    del pools["more"]
    control_plane.apply(cluster(namespace, pools=pools))
    eventually(lambda: seen("wp/main-more") is None, "the pool is gone")
    assert seen("wp/main-decode")


@pytest.mark.full
def test_a_pool_that_is_deleted_and_that_the_spec_names_is_made_again_at_its_size(
    control_plane: ControlPlane, namespace: str, operator: Operator, seen: Seen
) -> None:
    control_plane.apply(cluster(namespace))
    before = seen.soon("wp/main-decode")["metadata"]["uid"]
    control_plane.kubectl("-n", namespace, "scale", "wp/main-decode", "--replicas=3")
    eventually(lambda: group_sizes(seen)["decode"] == 3, "its size is known")
    unit = seen.unit_soon()
    control_plane.kubectl("-n", namespace, "delete", "wp/main-decode", "--timeout=20s")

    def again() -> bool:
        found = seen("wp/main-decode")
        return bool(found and found["metadata"]["uid"] != before)

    eventually(again, "it is made again")
    for _ in range(20):
        assert group_sizes(seen)["decode"] == 3, "no worker of it goes"
        time.sleep(0.1)
    made = seen.soon("wp/main-decode")
    assert made["spec"]["replicas"] == 3
    assert FINALIZER in made["metadata"]["finalizers"]
    assert seen.unit_soon()["metadata"]["uid"] == unit["metadata"]["uid"]


def test_routers_that_somebody_scales_stay_as_they_are(
    control_plane: ControlPlane, namespace: str, operator: Operator, seen: Seen
) -> None:
    control_plane.apply(cluster(namespace))
    replicas = lambda: seen.soon("deployment/main-router")["spec"]["replicas"]  # noqa: E731
    assert replicas() == 2
    control_plane.kubectl("-n", namespace, "scale", "deployment/main-router", "--replicas=5")
    control_plane.apply(cluster(namespace, router={"priorityClassName": "system-node-critical"}))

    def is_rolled() -> bool:
        pod = seen.soon("deployment/main-router")["spec"]["template"]["spec"]
        return bool(pod.get("priorityClassName") == "system-node-critical")

    eventually(is_rolled, "the operator writes the Deployment")
    assert replicas() == 5
    control_plane.apply(cluster(namespace, router={"replicas": 3}))
    eventually(lambda: replicas() == 3, "the spec says it again")


@pytest.mark.full
def test_a_killed_operators_successor_goes_on(
    control_plane: ControlPlane, namespace: str, operator: Operator, seen: Seen, tmp_path: Path
) -> None:
    control_plane.apply(cluster(namespace))
    seen.soon("wp/main-decode")
    operator.kill()
    control_plane.kubectl("-n", namespace, "scale", "wp/main-decode", "--replicas=2")
    with operator_of(control_plane, namespace, tmp_path):
        eventually(lambda: group_sizes(seen)["decode"] == 2, "the next one scales", timeout_s=60)
