"""Pods of a real API server as processes of this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Key
from deploy.controller.manifests.resources import CONFIG_MAPS, DEPLOYMENTS, PODS, SECRETS, SERVICES
from tests.deploy.controller.things import config_map
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.kubelet import NODE_NAMES, NODES, Kubelet
from tests.k8s.kubelet.machine import REPOSITORY, image_folders, pod_machine
from tests.k8s.kubelet.network import links
from tests.k8s.kubelet.objects import (
    container,
    deployment,
    env_of,
    evict,
    is_unschedulable,
    name_of,
    num_restarts,
    pod,
    pod_spec,
    python,
    secret,
    service,
    until_ready,
)
from tests.k8s.operating import eventually

_SERVER = """
import signal, threading
from concurrent import futures
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

ending = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: ending.set())
server = grpc.server(futures.ThreadPoolExecutor(2))
servicer = health.HealthServicer()
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
server.add_insecure_port("0.0.0.0:7100")
server.start()
servicer.set("", health_pb2.HealthCheckResponse.SERVING)
print("serves", flush=True)
ending.wait()
print("SIGTERM", flush=True)
"""
_ASK = """
import sys, grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
stub = health_pb2_grpc.HealthStub(grpc.insecure_channel(sys.argv[1]))
print(stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status)
"""
_SERVING = health_pb2.HealthCheckResponse.SERVING
_SLEEPS = ["sleep", "600"]
_ON_NODE_A = {"kubernetes.io/hostname": "node-a"}
_SAYS_PRE_STOP = {"preStop": {"exec": {"command": ["echo", "preStop"]}}}


def test_pods_of_a_deployment_serve_on_one_port_by_their_services_name_and_end_in_order(
    kubelet: Kubelet, kube: Kube, namespace: str
) -> None:
    server = container(
        "server",
        python(_SERVER),
        ports=[{"name": "grpc", "containerPort": 7100}],
        readinessProbe={"tcpSocket": {"port": "grpc"}},
        lifecycle=_SAYS_PRE_STOP,
    )
    kube.create(DEPLOYMENTS, deployment(namespace, "web", 2, pod_spec(server)))
    kube.create(SERVICES, service(namespace, "web", 7100))
    pods = until_ready(kubelet, "app=web", 2)

    addresses = {each["status"]["podIP"] for each in pods}
    assert len(addresses) == 2
    for address in addresses:
        with grpc.insecure_channel(f"{address}:7100") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            assert stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status == _SERVING
    asker = kubelet.container(name_of(pods[0]))
    said = asker.output_of(*python(_ASK, f"web.{namespace}.svc:7100"))
    assert said == f"{_SERVING}\n"

    kube.delete(DEPLOYMENTS, Key(namespace, "web"))
    eventually(lambda: not kubelet.pods("app=web"), "the Deployment's pods have ended")
    for each in pods:
        assert kubelet.log(name_of(each), "server-0") == "serves\npreStop\nSIGTERM\n"


def test_a_container_that_crashes_is_started_again_and_its_pod_says_so(
    kubelet: Kubelet, kube: Kube, namespace: str
) -> None:
    crashes = container(
        "crashes", ["sh", "-c", "test -e /data/seen || { touch /data/seen; exit 3; }; sleep 600"]
    )
    crashes["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]
    spec = pod_spec(crashes, volumes=[{"name": "data", "emptyDir": {}}])
    kube.create(PODS, pod(namespace, "twice", spec))
    eventually(lambda: num_restarts(kubelet, "app=twice") == 1, "it is started again")
    (made,) = until_ready(kubelet, "app=twice")
    (status,) = made["status"]["containerStatuses"]
    assert status["restartCount"] == 1
    assert status["lastState"]["terminated"]["exitCode"] == 3
    assert "running" in status["state"]


_LOOKS_AROUND = """
id -u; id -G
echo '$(POD)' $NODE $LEVEL $TOKEN '$$(POD)' '$(UNKNOWN)'
cat /etc/baton/cluster.yaml
touch /etc/baton/new || echo "it cannot write there"
touch /data/mine /tmp/mine; ls /tmp
python -c "import socket, cluster; print(socket.gethostname())"
exec sleep 600
"""


def test_a_container_has_its_user_its_volumes_its_environment_and_files_of_its_own(
    kubelet: Kubelet, kube: Kube, namespace: str
) -> None:
    settings = {"cluster.yaml": "model: demo\n", "level": "7"}
    kube.create(CONFIG_MAPS, config_map(Key(namespace, "settings"), settings))
    kube.create(SECRETS, secret(namespace, "token", {"auth_token": "s3cret"}))
    looks = container(
        "looks",
        ["sh", "-c", _LOOKS_AROUND],
        env=[
            {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            env_of("LEVEL", "configMapKeyRef", "settings", "level"),
            env_of("TOKEN", "secretKeyRef", "token", "auth_token"),
        ],
        volumeMounts=[
            {"name": "settings", "mountPath": "/etc/baton", "readOnly": True},
            {"name": "data", "mountPath": "/data"},
        ],
        readinessProbe={"exec": {"command": ["test", "-e", "/tmp/mine"]}},
    )
    spec = pod_spec(
        looks,
        volumes=[
            {"name": "settings", "configMap": {"name": "settings"}},
            {"name": "data", "emptyDir": {"medium": "Memory"}},
        ],
        securityContext={"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 2000},
    )
    kube.create(PODS, pod(namespace, "looker", spec))
    until_ready(kubelet, "app=looker")
    eventually(lambda: kubelet.log("looker", "looks-0").endswith("looker\n"), "it has looked")
    lines = kubelet.log("looker", "looks-0").splitlines()
    assert lines[:2] == ["1000", "1000 2000"]
    assert lines[2].split()[0] == "looker"
    assert lines[2].split()[1] in NODE_NAMES
    assert lines[2].split()[2:] == ["7", "s3cret", "$(POD)", "$(UNKNOWN)"]
    assert lines[3] == "model: demo"
    assert (lines[5], lines[-1]) == ("it cannot write there", "looker")
    checkout = {Path(folder).parts[2] for folder in image_folders() if folder.startswith("/tmp/")}
    assert set(lines[6:-1]) - checkout == {"mine"}
    assert not Path("/tmp/mine").exists()


def test_a_pod_asks_the_api_server_with_its_own_accounts_token(
    kubelet: Kubelet, kube: Kube, namespace: str
) -> None:
    program = """
from deploy.controller.kit.connection import Connection
from deploy.controller.kit.errors import StatusError
from deploy.controller.kit.kube import Kube
from deploy.controller.kit.objects import Selection
from deploy.controller.manifests.resources import PODS
try:
    Kube(Connection.in_cluster(), "pod").list(PODS, Selection("default"))
except StatusError as error:
    print(error.message)
"""
    spec = pod_spec(container("asks", python(program)), restartPolicy="Never")
    kube.create(PODS, pod(namespace, "asker", spec))
    key = Key(namespace, "asker")
    eventually(lambda: kube.get(PODS, key)["status"].get("phase") == "Succeeded", "it has asked")
    said = kubelet.log("asker", "asks-0")
    assert f"system:serviceaccount:{namespace}:default" in said


_HANGS_AT_FIRST = """
test -e /data/seen && touch /tmp/alive || touch /tmp/former
touch /data/seen
trap : TERM
while :; do sleep 600 & wait; done
"""


@pytest.mark.full
def test_a_container_that_hangs_is_killed_by_its_liveness_probe_and_started_again(
    kubelet: Kubelet, kube: Kube, namespace: str
) -> None:
    alive = {"exec": {"command": ["test", "-e", "/tmp/alive"]}, "periodSeconds": 1}
    starts = container(
        "hangs",
        ["sh", "-c", _HANGS_AT_FIRST],
        volumeMounts=[{"name": "data", "mountPath": "/data"}],
        livenessProbe=alive | {"failureThreshold": 2},
    )
    data = {"name": "data", "emptyDir": {}}
    kube.create(PODS, pod(namespace, "hung", pod_spec(starts, volumes=[data], grace_s=1)))
    eventually(lambda: num_restarts(kubelet, "app=hung") == 1, "it was started again")
    found = kubelet.container("hung").output_of("ls", "/tmp").split()
    assert "alive" in found
    assert "former" not in found, "each start has a file system of its own"


def cordon(kubelet: Kubelet, kube: Kube, node: Key) -> None:
    kube.merge_patch(NODES, node, {"spec": {"unschedulable": True}})
    eventually(lambda: kubelet.is_cordoned(node.name), f"{node.name} is cordoned")


def test_cordoned_nodes_get_nothing_and_an_evicted_pod_runs_its_pre_stop(
    kubelet: Kubelet, kube: Kube, control_plane: ControlPlane, namespace: str
) -> None:
    node_a, node_b = (Key("", name) for name in NODE_NAMES)
    sleeps = container("sleeps", _SLEEPS, lifecycle=_SAYS_PRE_STOP)
    cordon(kubelet, kube, node_a)
    kube.create(DEPLOYMENTS, deployment(namespace, "pair", 2, pod_spec(sleeps)))
    pods = until_ready(kubelet, "app=pair", 2)
    assert {each["spec"]["nodeName"] for each in pods} == {node_b.name}

    cordon(kubelet, kube, node_b)
    evict(control_plane, namespace, name_of(pods[0]))
    eventually(
        lambda: name_of(pods[0]) not in map(name_of, kubelet.pods("app=pair")), "it has gone"
    )
    assert kubelet.log(name_of(pods[0]), "sleeps-0") == "preStop\n"
    eventually(lambda: any(map(is_unschedulable, kubelet.pods("app=pair"))), "its successor waits")

    kube.merge_patch(NODES, node_a, {"spec": {"unschedulable": None}})
    pods = until_ready(kubelet, "app=pair", 2)
    assert {each["spec"]["nodeName"] for each in pods} == {node_a.name, node_b.name}


@pytest.mark.full
def test_a_pod_waits_for_a_secret_that_is_not_there_yet_and_says_so(
    kubelet: Kubelet, kube: Kube, namespace: str
) -> None:
    needs = container("needs", _SLEEPS, env=[env_of("T", "secretKeyRef", "late", "token")])
    kube.create(PODS, pod(namespace, "waits", pod_spec(needs)))

    def waits() -> bool:
        (found,) = kubelet.pods("app=waits")
        statuses = found["status"].get("containerStatuses", ())
        return any("no Secret late" in str(each["state"].get("waiting")) for each in statuses)

    eventually(waits, "it says what it waits for")
    kube.create(SECRETS, secret(namespace, "late", {"token": "x"}))
    until_ready(kubelet, "app=waits")


@pytest.mark.full
def test_pods_share_their_nodes_memory_and_disk_where_they_ask_for_it_and_nothing_else(
    kubelet: Kubelet, kube: Kube, namespace: str
) -> None:
    name = f"baton-{namespace}"
    cache = {"name": "cache", "hostPath": {"path": f"/{name}", "type": "DirectoryOrCreate"}}
    for called, shares in (("one", True), ("two", True), ("alone", False)):
        sleeps = container(
            "c", _SLEEPS, volumeMounts=[{"name": "cache", "mountPath": "/cache"}] * shares
        )
        spec = pod_spec(sleeps, volumes=[cache], hostIPC=shares, nodeSelector=_ON_NODE_A)
        kube.create(PODS, pod(namespace, called, spec))
    for called in ("one", "two", "alone"):
        until_ready(kubelet, f"app={called}")
    one, two, alone = (kubelet.container(called) for called in ("one", "two", "alone"))
    one.output_of("touch", f"/dev/shm/{name}", f"/cache/{name}")
    assert name in two.output_of("ls", "/dev/shm")
    assert name in two.output_of("ls", "/cache")
    assert name not in alone.output_of("ls", "/dev/shm")
    two.output_of("rm", f"/dev/shm/{name}")
    assert not Path("/", name).exists()


_HOLDS_A_POD = """
import sys, time
from pathlib import Path
from tests.k8s.kubelet.container import ContainerRun
from tests.k8s.kubelet.entry import Entry, User
from tests.k8s.kubelet.machine import image_environment, pod_machine

with pod_machine(Path(sys.argv[1])) as made:
    pod = made.network.join("pod")
    made.logs.mkdir()
    entry = Entry(
        cgroup=str(made.group.path / "sleeps"), pod_pid=pod.pid, container_pid=None,
        root=str(made.folder / "sleeps"), shares_memory=False, mounts=(), opened=(),
        user=User(0, 0), folder="/", command=("sleep", "600"),
        environment={**image_environment(), **made.mark},
    )
    ContainerRun({"name": "sleeps"}, entry, made.logs / "log", lambda: None)
    print(made.network.link, made.group.path, made.folder, made.memory, flush=True)
    time.sleep(600)
"""


def test_nothing_is_left_of_a_kubelet_that_was_killed(kubelet: Kubelet, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLDS_A_POD, str(tmp_path / "logs")]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        link, *folders = killed.stdout.readline().split()
        assert link in links()
        processes = Path(folders[0]) / "sleeps" / "cgroup.procs"
        assert processes.read_text()
        killed.kill()
    eventually(lambda: processes.read_text() == "", "its processes have ended")
    eventually(lambda: link not in links(), "its network has gone")
    assert all(Path(folder).exists() for folder in folders)
    with pod_machine(tmp_path / "other-logs"):
        assert not any(Path(folder).exists() for folder in folders)
