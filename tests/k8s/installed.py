"""A release of the chart with one ServingCluster called `default`, and what runs for it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from baton.control.client import ControlClient
from baton.v1 import control_pb2
from deploy.api.generate import CHART
from tests.deploy.schemas import REAL_CRD, check_ray_cluster
from tests.identities import ROOT
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.hosts import is_ready
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.kuberay import GroupChange, KubeRay
from tests.k8s.kubelet.objects import secret
from tests.k8s.operating import eventually
from tests.k8s.seen import Seen

MODEL = Path(__file__).parents[2] / "models" / "demo"
DECODE_STEP_S = 0.03
FAKE: dict[str, Any] = {
    "backend": "fake",
    "fake": {"decodeStepSeconds": DECODE_STEP_S},
    "maxNumSeqs": 64,
    "numBlocks": 4096,
}
PREFILL_AND_DECODE: dict[str, Any] = {"prefill": {"role": "prefill"}, "decode": {"role": "decode"}}
PREFILL_AND_TWO_DECODE: dict[str, Any] = {
    "prefill": {"role": "prefill"},
    "decode": {"role": "decode", "initialReplicas": 2},
}
HEAD = "app.kubernetes.io/component=head"
OPERATOR = "app.kubernetes.io/component=operator"
_LIVE_WITHIN_S = 150.0


def on_pods(timeout_s: float, *fixtures: str) -> list[pytest.MarkDecorator]:
    """Marks of a module whose tests run a whole cluster in pods."""
    fixtures = fixtures or ("crds", "kubelet", "kuberay")
    marks = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(timeout_s)]
    return [*marks, pytest.mark.usefixtures(*fixtures)]


def with_engine(engine: dict[str, Any], **advanced: dict[str, Any]) -> dict[str, Any]:
    """Sections of a spec: the engine's settings, with what only tests set among the advanced."""
    of_tests = {key: engine[key] for key in ("backend", "fake") if key in engine}
    rest = {key: value for key, value in engine.items() if key not in of_tests}
    return {"engine": rest, "advanced": {"engine": of_tests, **advanced}}


class Installed(Seen):
    """Install and change the release; read what the API server has of it."""

    def __init__(self, control_plane: ControlPlane, namespace: str, folder: Path) -> None:
        super().__init__(control_plane, namespace, "default")
        self._folder = folder
        self.redis: dict[str, Any] = {"enabled": False}
        """The chart's `cluster.redis`. {}: the chart's default, which runs a redis-server."""
        self.nodes: dict[str, Any] = {"preset": "cpu"}
        """The chart's `cluster.nodes`."""
        self.values: dict[str, Any] = {}
        """More of the chart's values."""
        self._spec: dict[str, Any] = {}

    def install(self, rollout: Mapping[str, Any] | None = None, **spec: Any) -> None:
        self._spec = {"rollout": {"interval": "10s"} | dict(rollout or {}), **spec}
        # The operator keeps a root that there is. Tests know this one.
        root = {"root": ROOT.decode()}
        self._control_plane.apply(secret(self.namespace, "default-identity-root", root))
        self._helm("install", "--skip-crds")

    def serve(
        self,
        pools: Mapping[str, Any] = PREFILL_AND_DECODE,
        engine: dict[str, Any] = FAKE,
        advanced: Mapping[str, Any] | None = None,
        **spec: Any,
    ) -> None:
        """Install what streams of a fake engine need. Every worker serves on return."""
        advanced = {"router": {"placement": {"localPrefill": "never"}}} | dict(advanced or {})
        usual = {"model": {"name": str(MODEL)}, "router": {"replicas": 1}, "pools": pools}
        self.install(**usual | with_engine(engine, **advanced) | spec)
        self.wait_available()
        for name, pool in pools.items():
            if pool is not None:
                self.wait_whole(name, pool.get("initialReplicas", 1))

    def upgrade(self, **values: Any) -> None:
        """To other values of the chart, with the ServingCluster that was installed."""
        self.values = values
        self._helm("upgrade")

    def _helm(self, verb: str, *options: str) -> None:
        cluster = {"enabled": True, "nodes": self.nodes, "redis": self.redis, "spec": self._spec}
        usual = {
            "watchNamespaces": [self.namespace],
            "crds": {"upgrade": False},
            "cluster": cluster,
        }
        path = self._folder / "values.json"
        path.write_text(json.dumps(usual | self.values))
        self._control_plane.helm(verb, "baton", CHART, "-n", self.namespace, "-f", path, *options)

    def scale_operator(self, replicas: int) -> None:
        self.kubectl("scale", "deployment", "-l", OPERATOR, f"--replicas={replicas}")

    def own_condition(self, kind: str) -> dict[str, Any]:
        return self.condition("servingcluster/default", kind)

    def wait_available(self, within_s: float = _LIVE_WITHIN_S) -> None:
        is_available = lambda: self.own_condition("Available").get("status") == "True"  # noqa: E731
        eventually(is_available, "the ServingCluster is available", within_s)

    def is_whole(self, pool: str, replicas: int) -> bool:
        """Whether all of the pool's workers serve, and no other one is left."""
        found = self.read(f"wp/{pool}")
        status = found.get("status", {})
        sizes = [status.get(name) for name in ("readyReplicas", "replicas")]
        is_seen = status.get("observedGeneration") == found["metadata"]["generation"]
        return is_seen and sizes == [replicas] * 2 and not status.get("draining")

    def wait_whole(self, pool: str, replicas: int) -> None:
        what = f"all {replicas} workers of {pool} serve"
        eventually(lambda: self.is_whole(pool, replicas), what, _LIVE_WITHIN_S)

    def draining(self) -> list[dict[str, Any]]:
        """The workers of `decode` that drain, by the pool's status."""
        found: list[dict[str, Any]] = self.read("wp/decode").get("status", {}).get("draining") or []
        return found

    def rollout(self) -> dict[str, Any]:
        """The ServingCluster's rollout, with the code of the unit that serves."""
        status = self.read("servingcluster/default")["status"]
        found: dict[str, Any] = status.get("rollout") or {}
        return found | {"unit": status.get("unit", "")}


def router_addresses(kubelet: Kubelet) -> list[str]:
    """Of router pods that are ready and stay; this machine reaches pods by their addresses."""
    return [
        f"{pod['status']['podIP']}:7100"
        for pod in kubelet.pods("app.kubernetes.io/component=router")
        if is_ready(pod) and "deletionTimestamp" not in pod["metadata"]
    ]


def router_address(kubelet: Kubelet) -> str:
    addresses = router_addresses(kubelet)
    assert addresses, "no router is ready"
    return addresses[0]


def control_address(kubelet: Kubelet) -> str:
    (head,) = kubelet.pods(HEAD)
    return f"{head['status']['podIP']}:7101"


def workers_of(kubelet: Kubelet, pool: str) -> dict[str, str]:
    """Pods of the pool's live workers, by worker, as the supervisor has them."""
    with ControlClient(control_address(kubelet)) as client:
        workers = client.fleet().workers
    return {
        worker.info.ref.worker_id: worker.info.pod_name
        for worker in workers
        if worker.state == control_pb2.WORKER_STATE_LIVE and worker.info.pool == pool
    }


_NO_GROUP = GroupChange(0, ())


def check_patches(kuberay: KubeRay, cluster: str = "default") -> set[str]:
    """Check what the operator has patched RayClusters to; returns the pods that it named.

    No group has shrunk but by the pods that the same patch named. All names are cleared in the end.
    Where KubeRay's own schema is at hand, it takes each spec.
    """
    named = set[str]()
    *_, last = kuberay.specs(cluster)  # others were deleted with what their last patches named
    eventually(lambda: not _named(kuberay.specs(cluster)[last][-1]), "the last patch is cleared")
    for specs in kuberay.specs(cluster).values():
        for before, after in itertools.pairwise(specs):
            now = _groups(after)
            for name, was in _groups(before).items():
                new = set(now.get(name, _NO_GROUP).to_delete) - set(was.to_delete)
                assert len(new) >= was.replicas - now.get(name, _NO_GROUP).replicas, name
                named |= new
        for spec in specs if REAL_CRD.exists() else ():
            check_ray_cluster({"apiVersion": "ray.io/v1", "kind": "RayCluster", "spec": spec})
    return named


def _groups(spec: Mapping[str, Any]) -> dict[str, GroupChange]:
    found = spec.get("workerGroupSpecs") or ()
    return {each["groupName"]: GroupChange.of(each) for each in found}


def _named(spec: Mapping[str, Any]) -> set[str]:
    return {name for group in _groups(spec).values() for name in group.to_delete}
