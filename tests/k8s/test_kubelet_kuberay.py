"""KubeRay's stand-in: how it sizes groups, and Ray itself in the pods that it makes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key, Selection
from deploy.controller.manifests.resources import PODS, RAY_CLUSTERS, SECRETS, SERVICES
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.errors import ContainerError
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.kuberay import GroupChange, KubeRay
from tests.k8s.kubelet.objects import (
    container,
    name_of,
    pod,
    pod_spec,
    secret,
    until_ready,
)
from tests.k8s.kubelet.ray_pods import quoted
from tests.k8s.operating import eventually

_RAY = {"object-store-memory": "80000000", "num-cpus": "0"}
_OWN_COMMAND = {"ray.io/overwrite-container-cmd": "true"}
_TOKEN = "a-token-of-ray" * 3
_JOIN_S = 120.0
_NODES = """
import json, ray
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
print(json.dumps([node["Resources"] for node in ray.nodes() if node["Alive"]]))
"""


def ray_cluster(namespace: str, name: str, groups: dict[str, int]) -> dict[str, Any]:
    """`groups`: how many pods each is to have; they offer the resource `pool/<group>`."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": name, "namespace": namespace, "annotations": _OWN_COMMAND},
        "spec": {
            "rayVersion": "2.60.0",
            "enableInTreeAutoscaling": False,
            "authOptions": {"mode": "token", "secretName": "ray-token"},
            "headGroupSpec": {
                "rayStartParams": _RAY | {"include-dashboard": "false"},
                "template": ray_template("ray-head"),
            },
            "workerGroupSpecs": [
                {
                    "groupName": group,
                    "replicas": replicas,
                    "minReplicas": 0,
                    "maxReplicas": 9,
                    "rayStartParams": _RAY | {"resources": quoted({f"pool/{group}": 2})},
                    "template": ray_template("ray-worker"),
                }
                for group, replicas in groups.items()
            ],
        },
    }


def ray_template(name: str) -> dict[str, Any]:
    starts = container(
        name,
        ["/bin/sh", "-c"],
        args=['eval "exec $KUBERAY_GEN_RAY_START_CMD"'],
        env=[{"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}],
    )
    return {"spec": pod_spec(starts, securityContext={"runAsUser": 1000})}


def stranger(namespace: str) -> dict[str, Any]:
    """A pod in which nothing runs yet."""
    waits = container(
        "ray",
        ["sleep", "600"],
        env=[
            {"name": "RAY_AUTH_MODE", "value": "token"},
            {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"},
        ],
    )
    return pod(namespace, "stranger", pod_spec(waits, securityContext={"runAsUser": 1000}))


def join(kubelet: Kubelet, token: str) -> None:
    """Start Ray in the stranger's pod. Raises ContainerError where it comes to nothing."""
    params = _RAY | {"address": "rays-head-svc:6379", "resources": '{"pool/stranger": 1}'}
    command = ["ray", "start", *(f"--{name}={value}" for name, value in params.items())]
    with_token = ("env", f"RAY_AUTH_TOKEN={token}", *command)
    kubelet.container("stranger").output_of(*with_token, timeout_s=_JOIN_S)


def size(plane: ControlPlane, cluster: Key, replicas: int, *to_delete: str) -> None:
    """Change the first group's size, and name the pods that are to go."""
    group = "/spec/workerGroupSpecs/0"
    strategy = {"workersToDelete": list(to_delete)}
    patch = [
        {"op": "replace", "path": f"{group}/replicas", "value": replicas},
        {"op": "add", "path": f"{group}/scaleStrategy", "value": strategy},
    ]
    name = f"rayclusters.ray.io/{cluster.name}"
    plane.kubectl(*("-n", cluster.namespace, "patch", name, "--type=json", "-p", json.dumps(patch)))


def pods_of(kube: Kube, namespace: str, group: str) -> set[str]:
    found = kube.list(PODS, Selection(namespace, f"ray.io/group={group}")).items
    return {name_of(pod) for pod in found}


def test_a_group_loses_the_pods_that_are_named_and_others_at_random_where_none_is(
    kuberay: KubeRay, control_plane: ControlPlane, kube: Kube, namespace: str
) -> None:
    key = Key(namespace, "sizes")
    kube.create(RAY_CLUSTERS, ray_cluster(namespace, "sizes", {"decode": 4}))
    eventually(lambda: len(pods_of(kube, namespace, "decode")) == 4, "four workers")
    before = pods_of(kube, namespace, "decode")
    named = sorted(before)[2]

    size(control_plane, key, 3, named)
    eventually(lambda: pods_of(kube, namespace, "decode") == before - {named}, "the named one goes")
    size(control_plane, key, 3)
    size(control_plane, key, 1)
    eventually(lambda: len(pods_of(kube, namespace, "decode")) == 1, "two at random go")
    assert pods_of(kube, namespace, "decode") < before - {named}
    size(control_plane, key, 2)
    eventually(lambda: len(pods_of(kube, namespace, "decode")) == 2, "one comes")

    sizes = [(4, ()), (3, (named,)), (3, ()), (1, ()), (2, ())]
    groups = [spec["workerGroupSpecs"][0] for spec in kuberay.specs("sizes")["sizes"]]
    assert list(map(GroupChange.of, groups)) == [GroupChange(*each) for each in sizes]
    eventually(
        lambda: kube.get(RAY_CLUSTERS, key)["status"].get("desiredWorkerReplicas") == 2,
        "the status says so",
    )
    service = kube.get(SERVICES, Key(namespace, "sizes-head-svc"))
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]


@pytest.mark.full
def test_a_pod_whose_ray_has_ended_for_good_is_replaced(
    kubelet: Kubelet, kuberay: KubeRay, kube: Kube, namespace: str
) -> None:
    cluster = ray_cluster(namespace, "ends", {})
    sleeps = container("ray", ["sleep", "600"], readinessProbe={"exec": {"command": ["true"]}})
    template = {"spec": pod_spec(sleeps, restartPolicy="Never")}
    cluster["spec"]["headGroupSpec"]["template"] = template
    kube.create(SECRETS, secret(namespace, "ray-token", {"auth_token": "x"}))
    kube.create(RAY_CLUSTERS, cluster)
    (head,) = until_ready(kubelet, "ray.io/group=headgroup")
    kubelet.container(name_of(head)).kill()
    eventually(lambda: name_of(head) not in pods_of(kube, namespace, "headgroup"), "it is deleted")
    until_ready(kubelet, "ray.io/group=headgroup")


@pytest.mark.cluster
@pytest.mark.full
def test_ray_nodes_of_each_group_join_the_head_by_its_token_and_the_named_one_goes(
    kubelet: Kubelet, kuberay: KubeRay, control_plane: ControlPlane, kube: Kube, namespace: str
) -> None:
    key = Key(namespace, "rays")
    kube.create(SECRETS, secret(namespace, "ray-token", {"auth_token": _TOKEN}))
    kube.create(RAY_CLUSTERS, ray_cluster(namespace, "rays", {"decode": 1, "prefill": 1}))
    kube.create(PODS, stranger(namespace))
    pods = until_ready(kubelet, "ray.io/cluster=rays", 3)
    decode, head, prefill = pods  # by name
    eventually(lambda: kube.get(RAY_CLUSTERS, key)["status"].get("state") == "ready", "it is ready")
    status = kube.get(RAY_CLUSTERS, key)["status"]
    assert status["availableWorkerReplicas"] == status["desiredWorkerReplicas"] == 2

    (_,) = kubelet.container(name_of(decode)).pids("raylet")

    def offered() -> list[dict[str, float]]:
        said = kubelet.container(name_of(head)).output_of("python", "-c", _NODES, timeout_s=60)
        nodes = json.loads(said.splitlines()[-1])
        return [{n: v for n, v in node.items() if n.startswith("pool/")} for node in nodes]

    each: list[dict[str, float]] = [{}, {"pool/decode": 2.0}, {"pool/prefill": 2.0}]
    eventually(lambda: sorted(offered(), key=str) == sorted(each, key=str), "all nodes have joined")

    (_,) = until_ready(kubelet, "app=stranger")
    with pytest.raises(ContainerError, match=r"(?i)token|authenticat"):
        join(kubelet, "another-token-of-ray" * 3)
    assert sorted(offered(), key=str) == sorted(each, key=str)
    join(kubelet, _TOKEN)
    each.append({"pool/stranger": 1.0})
    eventually(lambda: sorted(offered(), key=str) == sorted(each, key=str), "it was the token")

    size(control_plane, key, 0, name_of(decode))
    eventually(lambda: not pods_of(kube, namespace, "decode"), "the worker's pod goes")
    assert pods_of(kube, namespace, "prefill") == {name_of(prefill)}
