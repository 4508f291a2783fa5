"""KubeRay's stand-in: how it sizes groups, and Ray itself in the pods that it makes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key, Selection
from deploy.controller.resources import PODS, RAY_CLUSTERS, SECRETS, SERVICES
from tests.k8s.api_clients import kube_of
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
    until,
    until_ready,
)
from tests.k8s.kubelet.ray_start import quoted

_RAY = {"object-store-memory": "80000000", "num-cpus": "0"}
_OWN_COMMAND = {"ray.io/overwrite-container-cmd": "true"}
_TOKEN = "a-token-of-ray" * 3
_JOIN_S = 120.0
_NODES = """
import json, ray
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
print(json.dumps([node["Resources"] for node in ray.nodes() if node["Alive"]]))
"""


@pytest.fixture
def kube(control_plane: ControlPlane) -> Kube:
    return kube_of(control_plane)


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


def resize(kube: Kube, key: Key, group: str, replicas: int, *to_delete: str) -> None:
    """Size and named pods in one patch."""
    groups = kube.get(RAY_CLUSTERS, key)["spec"]["workerGroupSpecs"]
    size = {"replicas": replicas, "scaleStrategy": {"workersToDelete": list(to_delete)}}
    groups = [each | size if each["groupName"] == group else each for each in groups]
    kube.merge_patch(RAY_CLUSTERS, key, {"spec": {"workerGroupSpecs": groups}})


def pods_of(kube: Kube, namespace: str, group: str) -> set[str]:
    found = kube.list(PODS, Selection(namespace, f"ray.io/group={group}")).items
    return {name_of(pod) for pod in found}


def test_a_group_loses_the_pods_that_are_named_and_others_at_random_where_none_is(
    kuberay: KubeRay, kube: Kube, namespace: str
) -> None:
    key = Key(namespace, "sizes")
    kube.create(RAY_CLUSTERS, ray_cluster(namespace, "sizes", {"decode": 4}))
    until(lambda: len(pods_of(kube, namespace, "decode")) == 4, "four workers")
    before = pods_of(kube, namespace, "decode")
    named = sorted(before)[2]

    resize(kube, key, "decode", 3, named)
    until(lambda: pods_of(kube, namespace, "decode") == before - {named}, "the named one goes")
    resize(kube, key, "decode", 3)
    resize(kube, key, "decode", 1)
    until(lambda: len(pods_of(kube, namespace, "decode")) == 1, "two at random go")
    assert pods_of(kube, namespace, "decode") < before - {named}
    resize(kube, key, "decode", 2)
    until(lambda: len(pods_of(kube, namespace, "decode")) == 2, "one comes")

    sizes = [(4, ()), (3, (named,)), (3, ()), (1, ()), (2, ())]
    assert kuberay.changes("sizes", "decode") == [GroupChange(*size) for size in sizes]
    until(
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
    until(lambda: name_of(head) not in pods_of(kube, namespace, "headgroup"), "it is deleted")
    until_ready(kubelet, "ray.io/group=headgroup")


@pytest.mark.cluster
@pytest.mark.full
def test_ray_nodes_of_each_group_join_the_head_by_its_token_and_the_named_one_goes(
    kubelet: Kubelet, kuberay: KubeRay, kube: Kube, namespace: str
) -> None:
    key = Key(namespace, "rays")
    kube.create(SECRETS, secret(namespace, "ray-token", {"auth_token": _TOKEN}))
    kube.create(RAY_CLUSTERS, ray_cluster(namespace, "rays", {"decode": 1, "prefill": 1}))
    kube.create(PODS, stranger(namespace))
    pods = until_ready(kubelet, "ray.io/cluster=rays", 3)
    decode, head, prefill = pods  # by name
    until(lambda: kube.get(RAY_CLUSTERS, key)["status"].get("state") == "ready", "it is ready")
    status = kube.get(RAY_CLUSTERS, key)["status"]
    assert status["availableWorkerReplicas"] == status["desiredWorkerReplicas"] == 2
    assert status["head"]["podIP"] == head["status"]["podIP"]

    (_,) = kubelet.container(name_of(decode)).pids("raylet")

    def offered() -> list[dict[str, float]]:
        said = kubelet.container(name_of(head)).output_of("python", "-c", _NODES, timeout_s=60)
        nodes = json.loads(said.splitlines()[-1])
        return [{n: v for n, v in node.items() if n.startswith("pool/")} for node in nodes]

    each: list[dict[str, float]] = [{}, {"pool/decode": 2.0}, {"pool/prefill": 2.0}]
    until(lambda: sorted(offered(), key=str) == sorted(each, key=str), "all nodes have joined")

    (_,) = until_ready(kubelet, "app=stranger")
    with pytest.raises(ContainerError, match=r"(?i)token|authenticat"):
        join(kubelet, "another-token-of-ray" * 3)
    assert sorted(offered(), key=str) == sorted(each, key=str)
    join(kubelet, _TOKEN)
    each.append({"pool/stranger": 1.0})
    until(lambda: sorted(offered(), key=str) == sorted(each, key=str), "it was the token")

    resize(kube, key, "decode", 0, name_of(decode))
    until(lambda: not pods_of(kube, namespace, "decode"), "the worker's pod goes")
    assert pods_of(kube, namespace, "prefill") == {name_of(prefill)}
