"""From `helm install` to tokens: the chart, the operator, Ray in pods, routers, a prompt."""

from __future__ import annotations

import json

from baton.client import Client
from baton.client.events import Finished, HandedOff, Tokens
from cli.kubectl import target
from deploy.controller.manifests.common import POOL_LABEL
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.installed import (
    DECODE_STEP_S,
    HEAD,
    MODEL,
    Installed,
    check_patches,
    on_pods,
    router_address,
    workers_of,
)
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.kuberay import KubeRay
from tests.k8s.kubelet.objects import name_of
from tests.k8s.operating import eventually
from tests.k8s.plugin import Plugin
from tests.k8s.seen import BAD_ROUTER
from tests.k8s.streaming import streaming

pytestmark = on_pods(600)

NUM_TOKENS = 300
ROUTER = "app.kubernetes.io/component=router"


def pod_behind(control_plane: ControlPlane, installed: Installed, endpoint: str) -> str:
    """Where kubectl would forward a port to, by what the ServingCluster says of an endpoint: the
    kubelet stand-in serves no port-forward."""
    there = target(installed.read("servingcluster/default"), endpoint)
    selector = installed.read(f"service/{there.service}")["spec"]["selector"]
    labels = ",".join(f"{name}={value}" for name, value in selector.items())
    (pod,) = control_plane.read("pods", "-n", there.namespace, "-l", labels)["items"]
    return f"{pod['status']['podIP']}:{there.port}"


def test_helm_install_ends_with_an_answer_whose_kv_crossed_from_pod_to_pod(
    control_plane: ControlPlane, installed: Installed, kubelet: Kubelet, plugin: Plugin
) -> None:
    installed.install(
        model={"name": str(MODEL)},
        # On a loaded machine a handoff's figures come later than a short answer's last token.
        router={"replicas": 1},
        advanced={
            "router": {
                "placement": {"localPrefill": "never"},
                "timeouts": {"handoffReportSeconds": 10.0},
            }
        },
    )
    installed.wait_available()
    of_pods = {HEAD: "ray-head-0", f"{POOL_LABEL}=decode": "ray-worker-0", ROUTER: "router-0"}
    runs = [(name_of(kubelet.pods(label)[0]), run) for label, run in of_pods.items()]
    logs = lambda: [kubelet.log(*run) for run in runs]  # noqa: E731
    for name, log in zip(("head: ", "decode-0 cluster.worker.worker: ", "router: "), logs()):
        assert f"Z INFO {name}" in log, "Baton's own log"
    installed.change(logLevel="debug", logFormat="json")
    eventually(lambda: all("read again: /etc/baton/" in log for log in logs()), "they follow it")
    with Client(router_address(kubelet)) as client:
        events = list(client.generate(chat=[{"role": "user", "content": "Who is Hugo?"}]))
    text = "".join(event.text for event in events if isinstance(event, Tokens))
    assert text == "Hugo is the postman of Willowmere. He brings letters to every house."
    (handed_off,) = [event for event in events if isinstance(event, HandedOff)]
    assert handed_off.kv_bytes > 0
    assert isinstance(events[-1], Finished)
    pools = installed.read("servingcluster/default")["status"]["pools"]
    assert pools == {"prefill": "1/1", "decode": "1/1"}

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
    written = [[json.loads(line) for line in log.splitlines() if line[:1] == "{"] for log in logs()]
    assert all(written), "in pods that were not restarted"
    _, said, asked = written
    drains = [line for line in said if line["message"] == f"{leaves} drains"]
    assert [(line["worker"], line["pool"]) for line in drains] == [(leaves, "decode")]
    assert [line["outcome"] for line in asked if line["message"] == "request"] == ["stop"]


# --- scaling while streams run --------------------------------------------------------------------


class Drains:
    """What the pool's status has said of workers that drain while streams ran."""

    def __init__(self, installed: Installed) -> None:
        self._installed = installed
        self.most_running: dict[tuple[str, str], int] = {}
        """By worker and pod: streams that it still had."""

    def has_become(self, replicas: int) -> bool:
        for drain in self._installed.draining():
            one = drain["worker"], drain.get("pod", "")
            self.most_running[one] = max(self.most_running.get(one, 0), drain["numRunning"])
        return self._installed.is_whole("decode", replicas)


def figures_of(installed: Installed) -> bool:
    """Whether the pools' statuses have sound figures of the streams that run."""
    prefill, decode = (installed.read(f"wp/{pool}")["status"] for pool in ("prefill", "decode"))
    kv_percent, itl_s = decode.get("kvUsePercent"), decode.get("itlSeconds")
    ttft_s = prefill.get("ttftSeconds")
    if not (kv_percent and itl_s and ttft_s):
        return False
    return bool(kv_percent <= 100 and 0.5 * DECODE_STEP_S < itl_s < 30 and ttft_s < 30)


def test_a_pool_is_scaled_out_and_in_under_streams_beside_a_bad_cluster_and_none_changes_a_token(
    installed: Installed, kubelet: Kubelet, kuberay: KubeRay
) -> None:
    installed.serve()
    drains = Drains(installed)
    with streaming(kubelet, NUM_TOKENS) as streams:
        installed.make("bad", router=BAD_ROUTER)
        installed.condition_soon("servingcluster/bad", "Degraded", "InvalidSpec")
        installed.scale("decode", 3)
        streams.wait(lambda: drains.has_become(3), "it has 3 workers", 150)
        assert not drains.most_running
        workers = workers_of(kubelet, "decode")
        streams.wait_round()
        streams.wait(lambda: figures_of(installed), "what streams take is reported", 60)
        installed.scale("decode", 1)
        streams.wait(lambda: drains.has_become(1), "it has 1 worker", 150)
        left = workers_of(kubelet, "decode")
        assert installed.condition("servingcluster/bad", "Degraded")["reason"] == "InvalidSpec"
        assert installed.own_condition("Degraded")["reason"] == "Sound"
        assert installed.names("wp") == {"prefill", "decode"}, "nothing was made of the bad one"
        assert len(installed.names("rayclusters.ray.io")) == 1
    drained = {worker: pod for worker, pod in workers.items() if worker not in left}
    assert len(drained) == 2
    assert drains.most_running.keys() == drained.items()
    assert all(drains.most_running.values()), "they were named while they had streams"
    assert check_patches(kuberay) == set(drained.values())
