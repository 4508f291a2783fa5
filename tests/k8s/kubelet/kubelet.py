"""Scheduler and kubelets of one namespace: each pod without a node is bound to one that takes it,
and run here."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from baton.pacing import Backoff
from deploy.controller.kit.connection import Connection
from deploy.controller.kit.errors import NotFoundError
from deploy.controller.kit.informer import Informer, InformerSettings
from deploy.controller.kit.objects import Key, Object, Resource, Selection
from deploy.controller.kit.workqueue import Workers, WorkQueue
from deploy.controller.manifests.resources import CONFIG_MAPS, PODS, SERVICES
from tests.k8s.kubelet.container import ContainerRun, now_text
from tests.k8s.kubelet.errors import KubeletError
from tests.k8s.kubelet.hosts import service_hosts
from tests.k8s.kubelet.machine import Machine
from tests.k8s.kubelet.pod import PodRun, Surroundings
from tests.k8s.kubelet.pod_api import PodApi
from tests.k8s.kubelet.pod_status import condition
from tests.k8s.kubelet.volumes import claim_folder
from tests.k8s.tcp_proxy import TcpProxy

NODES = Resource("", "v1", "nodes", namespaced=False)
_HAS = {"cpu": "64", "memory": "256Gi", "pods": "110", "nvidia.com/gpu": "8"}
NODE_NAMES = ("node-a", "node-b")
_SYNC_S = 20.0
_END_S = 30.0
_QUICKLY = Backoff(first_s=0.1, longest_s=1.0)


class Kubelet:
    """Own the pods that run, and the threads that follow what there should be."""

    def __init__(self, connection: Connection, url: str, namespace: str, machine: Machine) -> None:
        """`url`: the API server's, for pods."""
        self._api = PodApi(connection, namespace)
        self._machine = machine
        self._gate = TcpProxy(url)
        self._around = Surroundings(machine, self._api, self._gate, lambda: self._hosts)
        self._hosts = ""
        self._hosts_lock = threading.Lock()
        self._runs: dict[str, PodRun] = {}
        self._bound: dict[str, str] = {}  # by uid; the API server's word of it comes later
        self._queue: WorkQueue[Key] = WorkQueue(_QUICKLY)
        self._workers = Workers(self._queue, self._reconcile, 1, "kubelet")
        self._pods = self._informer(PODS, Selection(namespace))
        self._services = self._informer(SERVICES, Selection(namespace))
        self._nodes = self._informer(NODES, Selection())
        self._configs = self._informer(CONFIG_MAPS, Selection(namespace))
        self._pods.add_handler(self._queue.add)
        self._nodes.add_handler(lambda _: self._look_at_unbound())
        self._configs.add_handler(lambda _: self._refresh_volumes())
        for informer in (self._pods, self._services):
            informer.add_handler(lambda _: self._refresh_hosts())

    def start(self) -> None:
        """Raises KubeletError, KubeError; the caller stops it nevertheless."""
        informers = (self._pods, self._services, self._nodes, self._configs)
        for informer in informers:
            informer.start()
        self._workers.start()
        for name in NODE_NAMES:
            self._api.kube.apply(NODES, node(name, {}), force=True)
            status = {"status": node_status(self._machine.network.gateway)}
            self._api.kube.merge_patch(NODES, Key("", name), status, "status")
        for informer in informers:
            if not informer.wait_synced(_SYNC_S):
                raise KubeletError("the API server's lists do not come")

    def stop(self) -> None:
        """Every process is ended at once, and every pod and node deleted. Raises KubeletError
        where something is left, KubeError where the API server does not help."""
        for informer in (self._pods, self._services, self._nodes, self._configs):
            informer.stop()
        self._workers.stop(_END_S)
        for run in self._runs.values():
            run.force()
        left = [name for name, run in self._runs.items() if not run.join(_END_S)]
        self._gate.close()
        if left:
            raise KubeletError(f"pods are left that do not end: {', '.join(left)}")
        for pod in self._api.kube.list(PODS, Selection(self._api.namespace)).items:
            self._api.delete_now(pod)
        for name in NODE_NAMES:
            with contextlib.suppress(NotFoundError):
                self._api.kube.delete(NODES, Key("", name))

    @property
    def host_address(self) -> str:
        """This machine, as pods reach it."""
        return self._machine.network.gateway

    def pods(self, labels: str = "") -> list[Object]:
        """Those of the namespace that a label selector chooses, as the API server has them."""
        return list(self._api.kube.list(PODS, Selection(self._api.namespace, labels)).items)

    def container(self, pod: str, name: str | None = None) -> ContainerRun:
        """The newest run of a pod's container, of the first one where none is named."""
        runs = [run for run in list(self._runs.values()) if run.name == pod]
        assert runs, f"no pod {pod} runs here"
        return runs[-1].container(name)

    def claim(self, name: str) -> Path:
        """What pods that mount a PersistentVolumeClaim of this name find: a test may fill it."""
        return claim_folder(self._machine.folder, name)

    def log(self, pod: str, run: str) -> str:
        """What a container's run has written, `preStop` included; `run`: its name and number, from
        0, like `server-0`."""
        return (self._machine.logs / pod / f"{run}.log").read_text(errors="replace")

    def is_cordoned(self, node: str) -> bool:
        """Whether pods that come from now on avoid it: a change arrives by a watch."""
        (found,) = [n for n in self._nodes.snapshot().values() if n["metadata"]["name"] == node]
        return bool(found["spec"].get("unschedulable"))

    def _informer(self, resource: Resource, selection: Selection) -> Informer:
        return Informer(self._api.kube, resource, selection, InformerSettings(backoff=_QUICKLY))

    def _reconcile(self, key: Key) -> None:
        pod = self._pods.get(key)
        uid = None if pod is None else pod["metadata"]["uid"]
        for other in [run for run in self._runs.values() if run.name == key.name]:
            if other.uid != uid:
                other.force()
                self._forget(other)
        if pod is None:
            return
        if "nodeName" not in pod["spec"]:
            self._schedule(pod)
            return
        run = self._runs.get(pod["metadata"]["uid"])
        if run is not None:
            run.update(pod)
        elif pod["spec"]["nodeName"] in NODE_NAMES:
            self._runs[pod["metadata"]["uid"]] = PodRun(pod, self._around)

    def _forget(self, run: PodRun) -> None:
        if not run.join(_END_S):
            raise KubeletError(f"pod {run.name} does not end")
        del self._runs[run.uid]

    def _schedule(self, pod: Object) -> None:
        if "deletionTimestamp" in pod["metadata"]:
            return
        pods = [self._as_bound(each) for each in self._pods.snapshot().values()]
        chosen = node_for(pod, self._nodes.snapshot().values(), pods)
        if chosen is not None:
            self._api.bind(pod, chosen)
            self._bound[pod["metadata"]["uid"]] = chosen
            return
        status = pod.get("status") or {}
        unplaced = condition("PodScheduled", False, status, "Unschedulable", "no node takes it")
        if unplaced not in (status.get("conditions") or ()):
            self._api.put_status(pod, {"conditions": [unplaced]})

    def _as_bound(self, pod: Object) -> Object:
        chosen = self._bound.get(pod["metadata"]["uid"])
        return pod | {"spec": {"nodeName": chosen} | pod["spec"]} if chosen else pod

    def _look_at_unbound(self) -> None:
        for key, pod in self._pods.snapshot().items():
            if "nodeName" not in pod["spec"]:
                self._queue.add(key)

    def _refresh_hosts(self) -> None:
        with self._hosts_lock:
            services = self._services.snapshot().values()
            hosts = service_hosts(services, self._pods.snapshot().values())
            if hosts != self._hosts:
                self._hosts = hosts
                for run in list(self._runs.values()):
                    run.refresh_hosts()

    def _refresh_volumes(self) -> None:
        for run in list(self._runs.values()):
            run.refresh_volumes()


@contextlib.contextmanager
def running_kubelet(
    connection: Connection, url: str, namespace: str, machine: Machine
) -> Iterator[Kubelet]:
    """All of it has ended after the block."""
    kubelet = Kubelet(connection, url, namespace, machine)
    try:
        kubelet.start()
        yield kubelet
    finally:
        kubelet.stop()


def node(name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    own = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": own | dict(labels)},
        "spec": {},
    }


def node_status(address: str) -> dict[str, Any]:
    now = now_text()
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "KubeletReady",
        "message": "the tests' kubelet",
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }
    return {
        "capacity": _HAS,
        "allocatable": _HAS,
        "addresses": [{"type": "InternalIP", "address": address}],
        "conditions": [ready],
    }


def node_for(
    pod: Mapping[str, Any], nodes: Iterable[Mapping[str, Any]], pods: Collection[Mapping[str, Any]]
) -> str | None:
    """The node that has the fewest pods, of those that take this one; None when none does."""
    wanted = (pod["spec"].get("nodeSelector") or {}).items()
    fit = [
        each["metadata"]["name"]
        for each in nodes
        if not each["spec"].get("unschedulable")
        and wanted <= (each["metadata"].get("labels") or {}).items()
    ]
    counts = {name: sum(p["spec"].get("nodeName") == name for p in pods) for name in fit}
    return min(fit, key=lambda name: (counts[name], name), default=None)
