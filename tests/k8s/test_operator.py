"""The operator on a real API server, where nothing runs the pods: what it writes, what it leaves
alone, and which changes it refuses."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from baton.config.cluster import load_config, read_config
from deploy.controller.kit.errors import StatusError
from deploy.controller.kit.finalizers import FINALIZER
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key
from deploy.controller.manifests.common import UNIT_LABEL
from deploy.controller.manifests.resources import SERVING_CLUSTERS
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.operating import eventually
from tests.k8s.seen import BAD_FIELD, BAD_ROUTER, Seen

pytestmark = pytest.mark.usefixtures("crds", "ray_clusters", "operator")

CLUSTER_FILE = """
model: org/name
served_model_name: chat
engine: {backend: fake, max_num_seqs: 32}
router: {admission: {max_queue: 7}}
pools:
  prefill: {role: prefill}
  decode: {role: decode, replicas: 3, max_replicas: 5, engine: {max_num_seqs: 8}}
"""


def test_a_cluster_gets_its_pools_its_ray_cluster_and_its_routers(seen: Seen) -> None:
    seen.make(pools={
        "prefill": {"role": "prefill"},
        "decode": {"role": "decode", "initialReplicas": 3},
    })  # fmt: skip
    assert seen.group_sizes() == {"prefill": 1, "decode": 3}
    assert seen.soon("deployment/main-router")["spec"]["replicas"] == 2
    assert seen.soon("service/main-router")
    pool = seen.soon("wp/main-decode")
    assert pool["spec"]["replicas"] == 3
    (owner,) = pool["metadata"]["ownerReferences"]
    assert owner["kind"] == "ServingCluster"
    found = seen.condition_soon("servingcluster/main", "Available", "Starting")
    silent = "Ray's head is starting; Ray's head has no pod"
    assert (found["status"], found["message"]) == ("False", silent)
    code = seen.unit_soon()["metadata"]["labels"][UNIT_LABEL]
    assert seen.unit_soon()["metadata"]["name"] == f"main-{code}"
    assert seen.soon(f"configmap/main-{code}")["metadata"]["labels"][UNIT_LABEL] == code
    assert seen.soon("service/main-control")["spec"]["selector"][UNIT_LABEL] == code
    unit = lambda: seen.soon("servingcluster/main")["status"].get("unit")  # noqa: E731
    eventually(lambda: unit() == code, "the unit is reported")


@pytest.mark.full
def test_a_pools_size_belongs_to_its_scaler_and_never_to_the_operator(seen: Seen) -> None:
    seen.make()
    seen.soon("wp/main-decode")
    seen.scale("decode", 4)
    seen.wait_for_size("decode", 4)
    seen.make(advanced={"router": {"admission": {"maxQueue": 7}}})
    eventually(lambda: "max_queue: 7" in seen.config(), "the change is done")
    pool = seen.soon("wp/main-decode")
    assert pool["spec"]["replicas"] == 4
    managers = [m for m in pool["metadata"]["managedFields"] if m["operation"] == "Apply"]
    assert managers
    assert all("f:replicas" not in m["fieldsV1"].get("f:spec", {}) for m in managers)


@pytest.mark.full
def test_a_model_that_was_available_leaves_its_name_to_the_next_one(
    kube: Kube, namespace: str, seen: Seen
) -> None:
    seen.make()
    assert "served_model_name: demo" in seen.config()
    served = {"status": {"model": "demo"}}
    kube.merge_patch(SERVING_CLUSTERS, Key(namespace, "main"), served, "status")
    seen.make(model={"name": "models/other"})
    eventually(lambda: "model: models/other" in seen.config(), "the change is done")
    assert "served_model_name: demo" in seen.config()


def test_what_baton_deploy_prints_is_taken_by_kubectl_and_becomes_the_cluster_of_the_file(
    control_plane: ControlPlane, namespace: str, seen: Seen, tmp_path: Path
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER_FILE)
    command = [sys.executable, "-m", "cli.main", "deploy", "-f", str(path)]
    done = subprocess.run(
        [*command, "--name", "main", "-n", namespace], capture_output=True, text=True, check=True
    )
    control_plane.kubectl("apply", "-f", "-", stdin=done.stdout)
    assert seen.group_sizes() == {"prefill": 1, "decode": 3}
    pool = seen.soon("wp/main-decode")["spec"]
    assert (pool["maxReplicas"], pool["engine"]) == (5, {"maxNumSeqs": 8})
    made = read_config(seen.config(), source="made")
    config = load_config(path)
    assert (made.model, made.model_name) == (config.model, config.model_name)
    assert made.engine == config.engine
    assert made.router.admission.max_queue == config.router.admission.max_queue == 7


def test_a_bad_template_is_reported_by_its_field_and_another_cluster_is_served_all_the_same(
    control_plane: ControlPlane, namespace: str, seen: Seen
) -> None:
    seen.make("bad", router=BAD_ROUTER)
    seen.make()
    found = seen.condition_soon("servingcluster/bad", "Degraded", "InvalidSpec")
    assert f"{BAD_FIELD}: must be a mapping, not 'x'" in found["message"]
    assert seen.unit_soon()
    assert Seen(control_plane, namespace, "bad").unit() is None
    assert seen("deployment/bad-router") is None
    seen.make("bad", router={"podTemplate": {"spec": {"nodeSelector": {"rack": "7"}}}})
    made = seen.soon("deployment/bad-router")
    assert made["spec"]["template"]["spec"]["nodeSelector"] == {"rack": "7"}


@pytest.mark.parametrize("strategy", ["Recreate", "RollingUpdate"])
def test_another_image_of_the_workers_makes_another_unit(seen: Seen, strategy: str) -> None:
    rollout = {"strategy": strategy}
    seen.make(images={"worker": "baton:nowhere"}, rollout=rollout)
    first = seen.unit_soon()["metadata"]["name"]
    seen.make(images={"worker": "baton:here"}, rollout=rollout)

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
def test_a_pool_that_is_deleted_and_that_the_spec_names_is_made_again_at_its_size(
    seen: Seen,
) -> None:
    seen.make()
    before = seen.soon("wp/main-decode")["metadata"]["uid"]
    seen.scale("decode", 3)
    seen.wait_for_size("decode", 3)
    unit = seen.unit_soon()
    seen.kubectl("delete", "wp/main-decode", "--timeout=20s")

    def again() -> bool:
        found = seen("wp/main-decode")
        return bool(found and found["metadata"]["uid"] != before)

    eventually(again, "it is made again")
    for _ in range(20):
        assert seen.group_sizes()["decode"] == 3, "no worker of it goes"
        time.sleep(0.1)
    made = seen.soon("wp/main-decode")
    assert made["spec"]["replicas"] == 3
    assert FINALIZER in made["metadata"]["finalizers"]
    assert seen.unit_soon()["metadata"]["uid"] == unit["metadata"]["uid"]


def test_routers_that_somebody_scales_stay_as_they_are(seen: Seen) -> None:
    seen.make()
    replicas = lambda: seen.soon("deployment/main-router")["spec"]["replicas"]  # noqa: E731
    assert replicas() == 2
    seen.kubectl("scale", "deployment/main-router", "--replicas=5")
    seen.make(router={"priorityClassName": "system-node-critical"})

    def is_rolled() -> bool:
        pod = seen.soon("deployment/main-router")["spec"]["template"]["spec"]
        return bool(pod.get("priorityClassName") == "system-node-critical")

    eventually(is_rolled, "the operator writes the Deployment")
    assert replicas() == 5
    seen.make(router={"replicas": 3})
    eventually(lambda: replicas() == 3, "the spec says it again")


# --- changes that are refused: by the API server where it has CEL, else by a condition ------------


def edit(kube: Kube, seen: Seen, pool: str, **fields: Any) -> str:
    """What the API server says against it; empty: it takes the change."""
    patch = {"spec": {"pools": {pool: fields}}}
    try:
        kube.merge_patch(SERVING_CLUSTERS, Key(seen.namespace, "main"), patch)
    except StatusError as error:
        return error.message
    return ""


def test_a_pools_role_stays_and_bounds_that_leave_its_size_out_are_refused(
    kube: Kube, seen: Seen
) -> None:
    seen.make()
    seen.condition_soon("servingcluster/main", "Degraded", "Sound")
    before = seen.soon("wp/main-decode")["spec"]
    if said := edit(kube, seen, "decode", role="mixed"):
        assert "role" in said
    else:
        found = seen.condition_soon("servingcluster/main", "Degraded", "InvalidSpec")
        assert "spec.pools.decode.role cannot be changed" in found["message"]
        edit(kube, seen, "decode", role="decode")
        seen.condition_soon("servingcluster/main", "Degraded", "Sound")
    assert seen.soon("wp/main-decode")["spec"] == before

    bounds = {"initialReplicas": 2, "minReplicas": 2}
    said = edit(kube, seen, "decode", **bounds, drainTimeout="1m")
    assert not said, "no rule of the API server sees both sizes"
    found = seen.condition_soon("servingcluster/main", "Degraded", "Refused")
    assert "minReplicas" in found["message"]
    assert seen.soon("wp/main-decode")["spec"] == before, "nothing of that change is done"
    edit(kube, seen, "decode", minReplicas=1)
    seen.condition_soon("servingcluster/main", "Degraded", "Sound")
    after = seen.soon("wp/main-decode")["spec"]
    assert after == before | {"minReplicas": 1, "drainTimeout": "1m"}


def test_of_two_clusters_with_one_pools_name_the_first_one_keeps_it(seen: Seen) -> None:
    seen.make("one", pools={"prefill": {"role": "prefill"}, "two-decode": {"role": "decode"}})
    seen.condition_soon("servingcluster/one", "Degraded", "Sound")
    before = seen.soon("wp/one-two-decode")["spec"]
    seen.make("one-two")
    found = seen.condition_soon("servingcluster/one-two", "Degraded", "InvalidSpec")
    assert "spec.pools.decode needs another name" in found["message"]
    assert "pool two-decode of ServingCluster one" in found["message"]
    assert seen.soon("wp/one-two-decode")["spec"] == before
    seen.condition_soon("servingcluster/one", "Degraded", "Sound")
