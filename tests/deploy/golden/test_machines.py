"""What a RayCluster must hold for each kind of machine, whatever else changes in it."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from deploy.controller.manifests.common import Object
from tests.deploy.golden.machines import (
    MACHINES,
    expected,
    ray_cluster_of,
    serving_cluster,
    text_of,
)
from tests.deploy.schemas import NOT_AT_HAND, REAL_CRD, check_pod, check_ray_cluster

every_machine = pytest.mark.parametrize("machine", MACHINES)
with_gpus = pytest.mark.parametrize(
    ("machine", "gpus"),
    [
        ("h100_infiniband", {"prefill": 4, "decode": 8}),
        ("a100_roce", {"prefill": 4, "decode": 4}),
        ("one_gpu", {"both": 1}),
    ],
)


def groups(machine: str) -> dict[str, Object]:
    made = ray_cluster_of(serving_cluster(machine))
    return {group["groupName"]: group for group in made["spec"]["workerGroupSpecs"]}


def pods(machine: str) -> dict[str, Object]:
    return {name: group["template"]["spec"] for name, group in groups(machine).items()}


def container(pod: Object) -> Object:
    (found,) = pod["containers"]
    assert isinstance(found, dict)
    return found


# --- all machines ---------------------------------------------------------------------------------


@every_machine
def test_the_operator_writes_what_it_wrote(machine: str) -> None:
    made = text_of(ray_cluster_of(serving_cluster(machine)))
    assert made == expected(machine).read_text(), "python -m tests.deploy.golden.machines"


@every_machine
@pytest.mark.skipif(not REAL_CRD.exists(), reason=NOT_AT_HAND)
def test_kuberay_takes_it(machine: str) -> None:
    check_ray_cluster(ray_cluster_of(serving_cluster(machine)))


@every_machine
def test_kubernetes_takes_its_pods(machine: str) -> None:
    spec = ray_cluster_of(serving_cluster(machine))["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        check_pod("one", group["template"])


@every_machine
def test_all_pools_are_in_one_block_of_the_fabric(machine: str) -> None:
    """A pod is near to pods of every pool, its own included: so the first one finds a node."""
    labels = [set(group["template"]["metadata"]["labels"].items())
              for group in groups(machine).values()]  # fmt: skip
    seen = []
    for pod in pods(machine).values():
        (kind, terms), *others = pod["affinity"]["podAffinity"].items()
        assert not others
        (term,) = terms
        term = term.get("podAffinityTerm", term)
        wanted = term["labelSelector"]["matchLabels"].items()
        assert all(wanted <= own for own in labels)
        seen.append((kind.partition("During")[0], term["topologyKey"]))
    assert set(seen) == {
        "h100_infiniband": {("required", "network.topology.nvidia.com/leaf")},
        "a100_roce": {("required", "network.topology.nvidia.com/spine")},
    }.get(machine, {("preferred", "topology.kubernetes.io/zone")})


# --- GPUs -----------------------------------------------------------------------------------------


@with_gpus
def test_a_pod_has_a_gpu_for_each_rank_and_tells_ray_of_as_many(
    machine: str, gpus: dict[str, int]
) -> None:
    made = groups(machine)
    assert set(made) == set(gpus)
    for name, wanted in gpus.items():
        group = made[name]
        resources = container(group["template"]["spec"])["resources"]
        assert resources["limits"]["nvidia.com/gpu"] == str(wanted)
        assert resources["requests"]["nvidia.com/gpu"] == str(wanted)
        assert group["rayStartParams"]["num-gpus"] == str(wanted)
        (told,) = shlex.split(group["rayStartParams"]["resources"])
        assert json.loads(told) == {f"baton-pool/{group['groupName']}": wanted}


@pytest.mark.parametrize("none", [None, 0, "0"])
def test_two_pools_share_one_gpu_in_time_slices_and_ray_knows_of_one_each(none: object) -> None:
    cluster = serving_cluster("one_gpu")
    share: dict[str, Any] = {"nvidia.com/gpu": none, "nvidia.com/gpu.shared": "1"}
    containers = [{"name": "ray-worker", "resources": {"requests": share, "limits": share}}]
    template = {"spec": {"containers": containers}}
    cluster["spec"]["pools"] = {
        role: {"role": role, "podTemplate": template} for role in ("prefill", "decode")
    }
    for group in ray_cluster_of(cluster)["spec"]["workerGroupSpecs"]:
        resources = container(group["template"]["spec"])["resources"]
        assert resources["limits"] == {"nvidia.com/gpu.shared": "1"}
        assert "nvidia.com/gpu" not in resources["requests"]
        assert group["rayStartParams"]["num-gpus"] == "1"
