"""What cluster.nodes, hub and images come to in the pods that the operator makes."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.api.checked import read_spec
from deploy.api.serving_cluster import ServingClusterSpec
from deploy.controller.manifests.common import Owner
from deploy.controller.manifests.routers import router_deployment
from tests.deploy.chart.chart import NAMESPACE, Helm, Object, first_cluster, of_kind, one
from tests.deploy.chart.golden import COMBINATIONS
from tests.deploy.golden.machines import RELEASE, ray_cluster_of
from tests.deploy.schemas import check_pod


def pods_of(helm: Helm, values: dict[str, Any]) -> dict[str, Object]:
    """The pods that come of a release's ServingCluster: each pool's, `head` and `router`; every one
    as Kubernetes takes it."""
    cluster = one(helm.template(values), "ServingCluster")
    owner = Owner("default", NAMESPACE, "0b5e1d0e-0000-4000-8000-000000000000")
    spec, ray = read_spec(ServingClusterSpec, cluster), ray_cluster_of(cluster)["spec"]
    groups = {
        "head": ray["headGroupSpec"],
        "router": router_deployment(owner, spec, RELEASE, "")["spec"],
    }
    groups |= {each["groupName"]: each for each in ray["workerGroupSpecs"]}
    pods = {name: group["template"] for name, group in groups.items()}
    for name, pod in pods.items():
        check_pod(name, pod)
    return pods


def container_of(pod: Object) -> Object:
    container: Object = pod["spec"]["containers"][0]
    return container


def env_of(pod: Object) -> dict[str, Any]:
    return {
        each["name"]: each.get("value", each.get("valueFrom")) for each in container_of(pod)["env"]
    }


def volume_of(pod: Object, name: str) -> Object:
    (volume,) = [each for each in pod["spec"]["volumes"] if each["name"] == name]
    return {key: value for key, value in volume.items() if key != "name"}


@pytest.mark.parametrize("preset", ["cpu", "gpu", "gpu-rdma"])
def test_each_preset_gives_pods_that_kubernetes_takes(helm: Helm, preset: str) -> None:
    pods = pods_of(helm, first_cluster(nodes={"preset": preset}))
    limits = container_of(pods["decode"])["resources"].get("limits", {})
    assert ("nvidia.com/gpu" in limits) == (preset != "cpu")
    assert ("rdma/hca" in limits) == (preset == "gpu-rdma")
    tolerated = [each["key"] for each in pods["decode"]["spec"].get("tolerations", ())]
    assert tolerated == ([] if preset == "cpu" else ["nvidia.com/gpu"])


def test_rdma_gets_the_adapter_memory_to_pin_and_ucx_that_knows_it(helm: Helm) -> None:
    values = first_cluster(nodes={"preset": "gpu-rdma"})
    pods = pods_of(helm, values)
    container = container_of(pods["prefill"])
    assert container["resources"]["limits"]["rdma/hca"] == 1
    assert container["resources"]["requests"]["rdma/hca"] == 1
    security = container["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert (security["runAsUser"], security["runAsNonRoot"]) == (0, False)
    assert security["allowPrivilegeEscalation"] is False
    spec = one(helm.template(values), "ServingCluster")["spec"]
    assert spec["advanced"]["transfer"] == {"ucxLibrary": "system"}
    assert (
        "securityContext" not in pods["router"]["spec"]["containers"][0]
        or (container_of(pods["router"])["securityContext"]["runAsNonRoot"])
    )


def test_without_a_word_pools_run_as_nobody_special(helm: Helm) -> None:
    pod = pods_of(helm, first_cluster(nodes={"preset": "gpu"}))["decode"]
    assert container_of(pod)["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not {"hostIPC", "hostPID", "hostNetwork"} & set(pod["spec"])
    assert volume_of(pod, "weights") == {"emptyDir": {}}


def test_nodes_settings_reach_every_pools_pods(helm: Helm) -> None:
    nodes = {
        "preset": "gpu",
        "nodeSelector": {"gpu": "h100"},
        "annotations": {"k8s.v1.cni.cncf.io/networks": "rdma-net"},
        "resources": {"hugepages-2Mi": "4Gi"},
        "shmSize": "8Gi",
        "sharedMemory": True,
        "env": {"UCX_NET_DEVICES": "mlx5_0:1", "UCX_IB_GID_INDEX": 3, "UCX_SEG": 1048576,
                "RATE": 0.5, "VERBOSE": True},
    }  # fmt: skip
    pods = pods_of(helm, first_cluster(nodes=nodes))
    for name in ("prefill", "decode"):
        pod = pods[name]
        assert pod["spec"]["nodeSelector"] == {"gpu": "h100"}
        assert pod["spec"]["hostIPC"]
        assert pod["spec"]["hostPID"]
        assert pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "rdma-net"
        assert container_of(pod)["resources"]["limits"]["hugepages-2Mi"] == "4Gi"
        assert volume_of(pod, "shm") == {"emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}
        assert env_of(pod)["UCX_NET_DEVICES"] == "mlx5_0:1"
        assert env_of(pod)["UCX_IB_GID_INDEX"] == "3"
        assert env_of(pod)["UCX_SEG"] == "1048576"
        assert env_of(pod)["RATE"] == "0.5"
        assert env_of(pod)["VERBOSE"] == "true"
    assert "hostIPC" not in pods["head"]["spec"]


def test_one_field_lets_every_pod_onto_tainted_nodes_and_labels_of_gpus_bind_workers_alone(
    helm: Helm,
) -> None:
    taint = {"key": "team", "operator": "Exists"}
    selector = {"disk": "ssd", "nvidia.com/gpu.product": "H100"}
    values = first_cluster(nodes={"tolerations": [taint], "nodeSelector": selector})
    _, redis = of_kind(helm.template(values), "Deployment")
    pods = pods_of(helm, values) | {"redis": redis["spec"]["template"]}
    for name, pod in pods.items():
        assert pod["spec"]["tolerations"] == [taint]
        is_worker = name in ("prefill", "decode")
        assert pod["spec"]["nodeSelector"] == (selector if is_worker else {"disk": "ssd"})
        assert pod["spec"]["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_a_pools_own_settings_come_before_what_all_pools_have(helm: Helm) -> None:
    env = [{"name": "UCX_TLS", "value": "tcp"}]
    own = {"nodeSelector": {"gpu": "l40s"}, "tolerations": [], "env": env}
    pools = {"prefill": own}
    nodes = {"preset": "gpu", "nodeSelector": {"gpu": "h100"}, "env": {"UCX_TLS": "rc", "A": "1"}}
    pods = pods_of(helm, first_cluster(nodes=nodes, spec={"pools": pools}))
    assert pods["prefill"]["spec"]["nodeSelector"] == {"gpu": "l40s"}
    assert "tolerations" not in pods["prefill"]["spec"]
    assert env_of(pods["prefill"])["UCX_TLS"] == "tcp"
    assert env_of(pods["prefill"])["A"] == "1"
    assert pods["decode"]["spec"]["nodeSelector"] == {"gpu": "h100"}
    assert env_of(pods["decode"])["UCX_TLS"] == "rc"


@pytest.mark.parametrize(
    ("cache", "source"),
    [
        ({"hostPath": "/mnt/w"}, {"hostPath": {"path": "/mnt/w", "type": "Directory"}}),
        ({"claimName": "w"}, {"persistentVolumeClaim": {"claimName": "w"}}),
    ],
)
def test_a_weights_cache_outlives_the_pod(
    helm: Helm, cache: dict[str, str], source: dict[str, Any]
) -> None:
    pods = pods_of(helm, first_cluster(nodes={"weightsCache": cache}))
    for name in ("head", "prefill", "decode"):
        pod = pods[name]
        is_there = "claimName" in cache or name in ("prefill", "decode")
        assert volume_of(pod, "weights") == (source if is_there else {"emptyDir": {}})
        (mount,) = [each for each in container_of(pod)["volumeMounts"] if each["name"] == "weights"]
        assert env_of(pod)["HF_HOME"].startswith(mount["mountPath"] + "/")


def test_an_air_gapped_site_asks_nobody_outside(helm: Helm) -> None:
    values = COMBINATIONS["air_gapped"]
    for name, pod in pods_of(helm, values).items():
        if name != "router":
            assert env_of(pod)["HF_HUB_OFFLINE"] == "1"
            assert env_of(pod)["HF_ENDPOINT"] == "https://hub.example.com"
        assert pod["spec"]["imagePullSecrets"] == [{"name": "mirror"}]
    images = []
    for deployment in of_kind(helm.template(values), "Deployment"):
        container = container_of(deployment["spec"]["template"])
        images += [container["image"], *(each for each in container["args"] if "-image=" in each)]
    assert len(images) == 4, "the operator's, those that it is told of, and its Redis's"
    assert all("registry.example.com/mirror/" in each for each in images)


def test_pods_pull_and_ask_the_hub_as_the_release_says(helm: Helm) -> None:
    images = {"pullPolicy": "Never", "pullSecrets": ["mirror"]}
    values = first_cluster() | {"images": images, "hub": {"tokenSecretName": "hub"}}
    for name, pod in pods_of(helm, values).items():
        assert container_of(pod)["imagePullPolicy"] == "Never"
        assert pod["spec"]["imagePullSecrets"] == [{"name": "mirror"}]
        token = {"secretKeyRef": {"name": "hub", "key": "token"}}
        assert env_of(pod).get("HF_TOKEN") == (None if name == "router" else token)
