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


def shm_limit(pod: Object) -> str:
    (volume,) = [each for each in pod["volumes"] if each["name"] == "shm"]
    assert volume["emptyDir"]["medium"] == "Memory"
    mounts = {each["name"]: each["mountPath"] for each in container(pod)["volumeMounts"]}
    assert mounts["shm"] == "/dev/shm"
    limit: str = volume["emptyDir"]["sizeLimit"]
    return limit


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


@every_machine
def test_the_head_takes_no_gpu_and_no_adapter(machine: str) -> None:
    head = ray_cluster_of(serving_cluster(machine))["spec"]["headGroupSpec"]["template"]["spec"]
    resources = container(head)["resources"]
    assert {*resources["requests"], *resources["limits"]} == {"cpu", "memory"}
    assert not {"tolerations", "affinity", "hostIPC"} & set(head)


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


@with_gpus
def test_nodes_that_keep_others_away_take_the_pods(machine: str, gpus: dict[str, int]) -> None:
    for pod in pods(machine).values():
        wanted = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        assert pod["tolerations"] == [wanted]


def test_the_product_of_the_gpus_is_named_where_nodes_differ() -> None:
    for machine, product in (("h100_infiniband", "H100"), ("a100_roce", "A100")):
        for pod in pods(machine).values():
            assert product in pod["nodeSelector"]["nvidia.com/gpu.product"]


# --- RDMA -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "adapter", "count"),
    [("h100_infiniband", "rdma/hca", 1), ("a100_roce", "rdma/roce_vf", 2)],
)
def test_a_pod_has_its_adapters_and_may_pin_memory(machine: str, adapter: str, count: int) -> None:
    cluster = serving_cluster(machine)
    assert cluster["spec"]["advanced"]["transfer"] == {"ucxLibrary": "system"}, (
        "the wheel's has no RDMA"
    )
    for pod in pods(machine).values():
        resources = container(pod)["resources"]
        assert resources["limits"][adapter] == resources["requests"][adapter] == count
        security = container(pod)["securityContext"]
        assert security["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        assert (security["runAsUser"], security["runAsNonRoot"]) == (0, False)
        assert security["allowPrivilegeEscalation"] is False


def test_infiniband_pods_have_huge_pages_and_large_shared_memory() -> None:
    for pod in pods("h100_infiniband").values():
        resources = container(pod)["resources"]
        assert resources["limits"]["hugepages-2Mi"] == "8Gi"
        assert resources["requests"]["hugepages-2Mi"] == "8Gi"
        assert shm_limit(pod) == "64Gi"


def test_roce_pods_are_on_the_sr_iov_networks_and_use_routable_addresses() -> None:
    for group in groups("a100_roce").values():
        annotations = group["template"]["metadata"]["annotations"]
        assert annotations["k8s.v1.cni.cncf.io/networks"] == "serving/roce-0,serving/roce-1"
        pod = group["template"]["spec"]
        told = {each["name"]: each.get("value") for each in container(pod)["env"]}
        assert told["UCX_IB_GID_INDEX"] == "3"
        assert told["UCX_NET_DEVICES"] == "mlx5_0:1,mlx5_1:1"
        assert told["RAY_USAGE_STATS_ENABLED"] == "0", "ours are still there"
        assert shm_limit(pod) == "32Gi"


# --- one GPU, and none ----------------------------------------------------------------------------


def test_one_gpu_serves_both_roles_in_one_pod_and_no_change_needs_a_second() -> None:
    made = groups("one_gpu")
    group = made["both"]
    assert (group["replicas"], group["maxReplicas"]) == (1, 1)
    assert group["template"]["metadata"]["labels"]["baton.dev/role"] == "mixed"
    assert shm_limit(group["template"]["spec"]) == "4Gi"
    assert container(group["template"]["spec"])["securityContext"]["runAsNonRoot"] is True


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


def test_cpu_pods_share_the_nodes_memory_and_take_no_gpu_where_there_is_one() -> None:
    for group in groups("cpu").values():
        pod = group["template"]["spec"]
        assert group["rayStartParams"]["num-gpus"] == "0"
        assert set(container(pod)["resources"]["limits"]) == {"cpu", "memory"}
        assert pod["hostIPC"]
        assert pod["hostPID"]
        assert shm_limit(pod) == "8Gi"
        assert container(pod)["securityContext"]["capabilities"] == {"drop": ["ALL"]}
