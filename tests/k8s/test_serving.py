"""From `helm install` to tokens: the chart, the operator, Ray in pods, routers, a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.client import Client
from baton.client.events import Finished, HandedOff, Tokens
from baton.control_client import ControlClient
from baton.v1 import control_pb2
from cli.kubectl import target
from deploy.api.generate import CHART
from deploy.controller.manifests.common import CLUSTER_LABEL
from tests.k8s.addresses import control_address, router_address
from tests.k8s.api_clients import kube_of
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.kuberay import KubeRay
from tests.k8s.operating import condition, eventually
from tests.k8s.patches import check_patches
from tests.k8s.streaming import Streaming, streaming
from tests.k8s.test_crds import BAD_ROUTER, cluster
from tests.k8s.test_kubectl_plugin import Plugin

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crds", "kubelet", "kuberay")]

MODEL = Path(__file__).parents[2] / "models" / "demo"
AVAILABLE_WITHIN_S = 150.0


class Installed:
    """A release of the chart with one ServingCluster called `default`."""

    def __init__(
        self,
        control_plane: ControlPlane,
        namespace: str,
        folder: Path,
        *,
        has_redis: bool = False,
        **nodes: Any,
    ) -> None:
        """`has_redis`: as the chart has it by default, which takes a redis-server on this machine;
        `nodes`: more of the chart's cluster.nodes."""
        self._control_plane, self.namespace, self._folder = control_plane, namespace, folder
        self._redis = {} if has_redis else {"enabled": False}
        self._nodes = {"preset": "cpu", **nodes}
        self._spec: dict[str, Any] = {}

    def install(self, **spec: Any) -> None:
        self._spec = spec
        self._helm("install", {}, "--skip-crds")

    def upgrade(self, **values: Any) -> None:
        """To other values of the chart, with the ServingCluster that was installed."""
        self._helm("upgrade", values)

    def _helm(self, verb: str, values: dict[str, Any], *options: str) -> None:
        usual = {
            "watchNamespaces": [self.namespace],
            "crds": {"upgrade": False},
            "cluster": {
                "enabled": True,
                "nodes": self._nodes,
                "redis": self._redis,
                "spec": self._spec,
            },
        }
        path = self._folder / "values.json"
        path.write_text(json.dumps(usual | values))
        self._control_plane.helm(verb, "baton", CHART, "-n", self.namespace, "-f", path, *options)

    def read(self, what: str) -> dict[str, Any]:
        found: dict[str, Any] = self._control_plane.read(what, "-n", self.namespace)
        return found

    def scale(self, pool: str, replicas: int) -> None:
        self._control_plane.kubectl(
            "-n", self.namespace, "scale", f"wp/{pool}", f"--replicas={replicas}"
        )

    def wait_available(self, within_s: float = AVAILABLE_WITHIN_S) -> None:
        def told() -> dict[str, Any] | None:
            found = condition(self.read("servingcluster/default"), "Available")
            return found if found.get("status") == "True" else None

        eventually(told, "the ServingCluster is available", within_s)


@pytest.fixture
def installed(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Installed:
    return Installed(control_plane, namespace, tmp_path)


def pod_behind(control_plane: ControlPlane, installed: Installed, endpoint: str) -> str:
    """Where kubectl would forward a port to, by what the ServingCluster tells of an endpoint: the
    kubelet stand-in serves no port-forward."""
    there = target(installed.read("servingcluster/default"), endpoint)
    selector = installed.read(f"service/{there.service}")["spec"]["selector"]
    labels = ",".join(f"{name}={value}" for name, value in selector.items())
    (pod,) = control_plane.read("pods", "-n", there.namespace, "-l", labels)["items"]
    return f"{pod['status']['podIP']}:{there.port}"


@pytest.mark.full
def test_helm_install_ends_with_an_answer_whose_kv_crossed_from_pod_to_pod(
    control_plane: ControlPlane,
    installed: Installed,
    kubelet: Kubelet,
    kuberay: KubeRay,
    tmp_path: Path,
) -> None:
    installed.install(
        model={"name": str(MODEL)},
        # On a loaded machine a handoff's figures come later than a short answer's last token.
        router={"replicas": 1},
        advanced={"router": {"localPrefill": "never", "handoffReportWaitSeconds": 10.0}},
    )
    installed.wait_available()
    with Client(router_address(kubelet)) as client:
        events = list(client.generate(chat=[{"role": "user", "content": "Who is Hugo?"}]))
    text = "".join(event.text for event in events if isinstance(event, Tokens))
    assert text == "Hugo is the postman of Willowmere. He brings letters to every house."
    (handed_off,) = [event for event in events if isinstance(event, HandedOff)]
    assert handed_off.kv_bytes > 0
    assert isinstance(events[-1], Finished)
    pools = installed.read("servingcluster/default")["status"]["pools"]
    assert pools == {"prefill": "1/1", "decode": "1/1"}

    plugin = Plugin(control_plane, kube_of(control_plane), tmp_path, installed.namespace)
    control, grpc = (pod_behind(control_plane, installed, each) for each in ("control", "grpc"))
    workers = [*workers_of(kubelet, "prefill"), *workers_of(kubelet, "decode")]
    assert len(workers) == 2
    for asked in (
        ("status", "--address", control),
        ("top", "--address", control),
        ("explain", "Who is Hugo?", "--address", grpc),
    ):
        done = plugin(*asked)
        assert done.returncode == 0, done.stderr
        assert all(worker in done.stdout for worker in workers), done.stdout
    leaves = workers[-1]
    done = plugin("drain", leaves, "--address", control)
    assert done.returncode == 0, done.stderr
    assert f"{leaves} has left" in done.stdout


# --- scaling while streams run --------------------------------------------------------------------

NUM_TOKENS = 300
DECODE_STEP_S = 0.03
FAKE: dict[str, Any] = {
    "backend": "fake",
    "fake": {"decodeStepSeconds": DECODE_STEP_S},
    "maxNumSeqs": 64,
    "numBlocks": 4096,
}


def with_engine(engine: dict[str, Any], **advanced: dict[str, Any]) -> dict[str, Any]:
    """Sections of a spec: the engine's settings, with what only tests set among the advanced."""
    of_tests = {key: engine[key] for key in ("backend", "fake") if key in engine}
    rest = {key: value for key, value in engine.items() if key not in of_tests}
    return {"engine": rest, "advanced": {"engine": of_tests, **advanced}}


class Drains:
    """What the pool's status on the server has told of workers that drain while streams ran."""

    def __init__(self, installed: Installed, streams: Streaming) -> None:
        self._installed, self._streams = installed, streams
        self.most_running: dict[tuple[str, str], int] = {}
        """By worker and pod: streams that it still had."""

    def look(self) -> dict[str, Any]:
        """The pool's status; raises what has failed of the streams."""
        status: dict[str, Any] = self._installed.read("wp/decode").get("status", {})
        self._streams.check()
        for told in status.get("draining") or ():
            one = told["worker"], told.get("pod", "")
            self.most_running[one] = max(self.most_running.get(one, 0), told["numRunning"])
        return status


def workers_of(kubelet: Kubelet, pool: str) -> dict[str, str]:
    """Pods of the pool's live workers, by worker, as the supervisor has them."""
    with ControlClient(control_address(kubelet)) as client:
        workers = client.fleet().workers
    return {
        worker.info.ref.worker_id: worker.info.pod_name
        for worker in workers
        if worker.state == control_pb2.WORKER_STATE_LIVE and worker.info.pool == pool
    }


def figures_of(installed: Installed) -> bool:
    """Whether the pools' statuses tell what running streams are to them, in sound figures."""
    prefill, decode = (installed.read(f"wp/{pool}")["status"] for pool in ("prefill", "decode"))
    told = decode.get("kvUsePercent"), decode.get("itlSeconds"), prefill.get("ttftSeconds")
    return all(told) and told[0] <= 100 and 0.5 * DECODE_STEP_S < told[1] < 30 > told[2]


class BadCluster:
    """A second ServingCluster of the namespace, which cannot be read; told so on return."""

    def __init__(self, control_plane: ControlPlane, installed: Installed) -> None:
        self._installed = installed
        made = cluster(installed.namespace, router=BAD_ROUTER)
        made["metadata"]["name"] = "bad"
        control_plane.apply(made)
        eventually(lambda: self._fault("bad") == ("True", "InvalidSpec"), "it is told so")

    def check_alone(self) -> None:
        """Nothing was made of it, and nothing of the other one was touched for it."""
        assert self._fault("bad") == ("True", "InvalidSpec")
        assert self._fault("default") == ("False", "Sound")
        rays = self._installed.read("rayclusters.ray.io")["items"]
        assert [each["metadata"]["labels"][CLUSTER_LABEL] for each in rays] == ["default"]
        assert self._names("wp") == {"prefill", "decode"}

    def _fault(self, name: str) -> tuple[str, str]:
        told = condition(self._installed.read(f"servingcluster/{name}"), "Degraded")
        return told.get("status", ""), told.get("reason", "")

    def _names(self, kind: str) -> set[str]:
        return {each["metadata"]["name"] for each in self._installed.read(kind)["items"]}


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_pool_is_scaled_out_and_in_under_streams_beside_a_bad_cluster_and_none_changes_a_token(
    control_plane: ControlPlane, installed: Installed, kubelet: Kubelet, kuberay: KubeRay
) -> None:
    installed.install(
        model={"name": str(MODEL)},
        **with_engine(FAKE, router={"localPrefill": "never"}),
        router={"replicas": 1},
    )
    installed.wait_available()
    with streaming(kubelet, NUM_TOKENS) as streams:
        drains = Drains(installed, streams)

        def has(replicas: int) -> bool:
            status = drains.look()
            told = status.get("readyReplicas", 0), status.get("replicas", 0)
            return told == (replicas, replicas) and not status.get("draining")

        bad = BadCluster(control_plane, installed)
        installed.scale("decode", 3)
        eventually(lambda: has(3), "it has 3 workers", 150)
        assert not drains.most_running
        workers = workers_of(kubelet, "decode")
        streams.wait_round()
        eventually(lambda: figures_of(installed), "what streams take is told", 60)
        installed.scale("decode", 1)
        eventually(lambda: has(1), "it has 1 worker", 150)
        left = workers_of(kubelet, "decode")
        bad.check_alone()
    drained = {worker: pod for worker, pod in workers.items() if worker not in left}
    assert len(drained) == 2
    assert drains.most_running.keys() == drained.items()
    assert all(drains.most_running.values()), "they were named while they had streams"
    assert check_patches(kuberay) == set(drained.values())
