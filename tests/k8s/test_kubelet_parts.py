"""What the kubelet and KubeRay's stand-in decide, without a machine or an API server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.k8s.control_plane.assets import Assets, Clients, RunningCluster
from tests.k8s.kubelet.container import Ended
from tests.k8s.kubelet.environment import PodFacts, command_of, environment_of, user_of
from tests.k8s.kubelet.errors import ContainerError, NotPossibleError
from tests.k8s.kubelet.hosts import hosts_of, service_hosts
from tests.k8s.kubelet.kubelet import node_for
from tests.k8s.kubelet.machine import check_leaves_pods, check_possible
from tests.k8s.kubelet.objects import container, pod, pod_spec, service
from tests.k8s.kubelet.pod_status import ContainerState, PodState
from tests.k8s.kubelet.ray_pods import (
    head_pod,
    head_service,
    quantity,
    quoted,
    worker_pod,
)

_ENDED_WELL = Ended(0, "then", "now")
_CRASHED = Ended(1, "then", "now")


def ray_cluster(**spec: Any) -> dict[str, Any]:
    def template(name: str) -> dict[str, Any]:
        ray = container(name, ["sh"], args=["-c", "sleep 1"])
        ray["resources"] = {"limits": {"memory": "1Gi", "nvidia.com/gpu": "4"}}
        return {"metadata": {"labels": {"app.kubernetes.io/name": "baton"}}, "spec": pod_spec(ray)}

    group = {
        "groupName": "decode",
        "rayStartParams": {"resources": quoted({"pool": 1})},
        "template": template("ray-worker"),
    }
    head = {"rayStartParams": {"include-dashboard": "false"}, "template": template("ray-head")}
    return {
        "metadata": {"name": "main", "namespace": "ns", "uid": "u"},
        "spec": {"headGroupSpec": head, "workerGroupSpecs": [group], **spec},
    }


def variables(made: dict[str, Any]) -> dict[str, Any]:
    env = made["spec"]["containers"][0]["env"]
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in env}


def worker_of(cluster: dict[str, Any]) -> dict[str, Any]:
    return worker_pod(cluster, cluster["spec"]["workerGroupSpecs"][0])


def at(made: dict[str, Any], address: str, is_ready: bool = True) -> dict[str, Any]:
    ready = {"type": "Ready", "status": "True" if is_ready else "False"}
    return {**made, "status": {"podIP": address, "conditions": [ready]}}


# --- KubeRay --------------------------------------------------------------------------------------


def test_ray_start_says_what_the_group_and_its_container_say() -> None:
    cluster = ray_cluster()
    assert variables(head_pod(cluster))["KUBERAY_GEN_RAY_START_CMD"].split() == [
        *("ray", "start", "--head", "--block"),
        *("--dashboard-agent-listen-port=52365", "--dashboard-host=0.0.0.0"),
        *("--include-dashboard=false", "--memory=1073741824"),
        *("--metrics-export-port=8080", "--num-gpus=4"),
    ]
    assert variables(worker_of(cluster))["KUBERAY_GEN_RAY_START_CMD"].split() == [
        *("ray", "start", "--address=main-head-svc.ns.svc.cluster.local:6379", "--block"),
        *("--dashboard-agent-listen-port=52365", "--memory=1073741824"),
        *("--metrics-export-port=8080", "--num-gpus=4", '--resources="{\\"pool\\":', '1}"'),
    ]


def test_ray_containers_know_where_the_head_is_and_its_token() -> None:
    cluster = ray_cluster(authOptions={"mode": "token", "secretName": "secret"})
    token = {"secretKeyRef": {"name": "secret", "key": "auth_token"}}
    head, worker = head_pod(cluster), worker_of(cluster)
    assert variables(head)["RAY_ADDRESS"] == "127.0.0.1:6379"
    assert variables(worker)["RAY_ADDRESS"] == "main-head-svc.ns.svc.cluster.local:6379"
    assert variables(worker)["FQ_RAY_IP"] == "main-head-svc.ns.svc.cluster.local"
    assert variables(worker)["RAY_IP"] == "main-head-svc"
    assert variables(head)["RAY_AUTH_TOKEN"] == variables(worker)["RAY_AUTH_TOKEN"] == token
    (waits,) = worker["spec"]["initContainers"]
    assert {"name": "RAY_AUTH_TOKEN", "valueFrom": token} in waits["env"]


def test_the_head_keeps_its_state_where_the_cluster_says_so() -> None:
    password = {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}}
    options = {"redisAddress": "redis:6379", "redisPassword": password}
    cluster = ray_cluster(gcsFaultToleranceOptions=options)
    head = variables(head_pod(cluster))
    assert head["RAY_REDIS_ADDRESS"] == "redis:6379"
    assert head["RAY_external_storage_namespace"] == "u"
    assert head["REDIS_PASSWORD"] == password["valueFrom"]
    assert "--redis-password=$REDIS_PASSWORD" in head["KUBERAY_GEN_RAY_START_CMD"]
    assert variables(worker_of(cluster))["RAY_gcs_rpc_server_reconnect_timeout_s"] == "600"


@pytest.mark.parametrize(
    ("said", "number"), [("500m", 0.5), ("8Gi", 8 * 2**30), ("1e3", 1000), (2, 2), ("1.5", 1.5)]
)
def test_quantities_are_read_as_kubernetes_writes_them(said: str | int, number: float) -> None:
    assert quantity(said) == number


# --- the kubelet ----------------------------------------------------------------------------------


def test_a_service_leads_to_its_pods_that_are_ready_and_stay_and_a_heads_to_its_head() -> None:
    def web(name: str) -> dict[str, Any]:
        made = pod("ns", name, pod_spec())
        made["metadata"]["labels"] = {"app": "web"}
        return made

    ready, unready = at(web("a"), "10.0.0.1"), at(web("b"), "10.0.0.2", is_ready=False)
    going = at(web("c"), "10.0.0.3")
    going["metadata"]["deletionTimestamp"] = "now"
    other = at(pod("ns", "other", pod_spec()), "10.0.0.4")
    hosts = service_hosts([service("ns", "web", 80)], [ready, unready, going, other])
    assert hosts == "10.0.0.1 web web.ns web.ns.svc web.ns.svc.cluster.local\n"
    assert hosts_of("a", "10.0.0.1", hosts).splitlines()[2:] == ["10.0.0.1 a", hosts.strip()]

    cluster = ray_cluster()
    head, worker = at(head_pod(cluster), "10.0.0.5", is_ready=False), worker_of(cluster)
    hosts = service_hosts([head_service(cluster)], [head, at(worker, "10.0.0.6")])
    assert hosts.startswith("10.0.0.5 main-head-svc main-head-svc.ns ")
    assert "10.0.0.6" not in hosts


def test_a_reference_to_what_is_not_there_is_an_error() -> None:
    made = pod("ns", "p", pod_spec(nodeName="node-a"))
    made["metadata"]["uid"] = "u"
    facts = PodFacts(made, "10.0.0.1", "10.0.0.254")
    reads = container("c", ["x"])
    source: dict[str, dict[str, Any]] = {"secretKeyRef": {"name": "gone", "key": "k"}}
    reads["env"] = [{"name": "X", "valueFrom": source}]
    with pytest.raises(ContainerError, match="no Secret gone"):
        environment_of(reads, facts, lambda kind, name: None, {})
    source["secretKeyRef"]["optional"] = True
    assert "X" not in environment_of(reads, facts, lambda kind, name: None, {})
    with pytest.raises(ContainerError, match="no command"):
        command_of({"name": "c", "args": ["x"]}, {})


def test_a_container_that_must_not_be_root_is_not_started_as_root() -> None:
    forbids = container("c", ["x"], securityContext={"runAsNonRoot": True})
    made = pod("ns", "p", pod_spec(forbids))
    with pytest.raises(ContainerError, match="runAsNonRoot"):
        user_of(made, forbids)
    made["spec"]["securityContext"] = {"runAsUser": 1000, "fsGroup": 2000}
    assert user_of(made, forbids).uid == 1000
    assert user_of(made, forbids).groups == (2000,)


def test_a_pod_goes_to_the_emptier_node_that_takes_it() -> None:
    def node(name: str, **spec: Any) -> dict[str, Any]:
        return {"metadata": {"name": name, "labels": {"zone": name[-1]}}, "spec": spec}

    nodes = [node("node-a"), node("node-b"), node("node-c", unschedulable=True)]
    new = pod("ns", "new", pod_spec())
    old = pod("ns", "old", pod_spec(nodeName="node-a"))
    assert node_for(new, nodes, [old]) == "node-b"
    new["spec"]["nodeSelector"] = {"zone": "a"}
    assert node_for(new, nodes, [old]) == "node-a"
    new["spec"]["nodeSelector"] = {"zone": "c"}
    assert node_for(new, nodes, []) is None


@pytest.mark.parametrize(
    ("containers", "phase"),
    [
        ([ContainerState("a", "", running_since="then")], "Running"),
        ([ContainerState("a", "", waits_for="ContainerCreating")], "Pending"),
        ([ContainerState("a", "", ended=_CRASHED, waits_for="CrashLoopBackOff")], "Running"),
        ([ContainerState("a", "", ended=_ENDED_WELL, is_over=True)], "Succeeded"),
        ([ContainerState("a", "", ended=_CRASHED, is_over=True)], "Failed"),
    ],
)
def test_a_pods_phase_is_that_of_its_containers(
    containers: list[ContainerState], phase: str
) -> None:
    assert PodState("10.0.0.1", "10.0.0.254", "then", [], containers, False).phase == phase


def test_a_pod_is_ready_while_all_of_it_is_and_it_is_not_deleted() -> None:
    good = ContainerState("a", "", running_since="then", is_ready=True)
    bad = ContainerState("b", "", running_since="then")

    def is_ready(containers: list[ContainerState], is_going: bool) -> bool:
        return PodState("10.0.0.1", "10.0.0.2", "then", [], containers, is_going).is_ready

    assert is_ready([good], is_going=False)
    assert not is_ready([good, bad], is_going=False)
    assert not is_ready([good], is_going=True)


def test_a_machine_that_allows_no_pods_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = check_possible.__wrapped__  # it remembers what it has found
    with monkeypatch.context() as without_programs:
        without_programs.setenv("PATH", "/nowhere")
        with pytest.raises(NotPossibleError, match="not on PATH: ip, unshare, nsenter"):
            check()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(NotPossibleError, match="root"):
        check()


def test_a_control_plane_that_makes_no_pods_or_runs_them_itself_is_refused() -> None:
    program, clients = Path("program"), Clients(Path("kubectl"), None)
    check_leaves_pods(Assets(program, program, program, program, clients))
    with pytest.raises(NotPossibleError, match="no kube-controller-manager"):
        check_leaves_pods(Assets(program, program, None, program, clients))
    with pytest.raises(NotPossibleError, match="kubelets of its own"):
        check_leaves_pods(RunningCluster(Path("kubeconfig"), clients))
