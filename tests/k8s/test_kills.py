"""The operator is killed right before and right after everything that it does to scale a pool, to
roll one, and to have another cohort take over."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from deploy.api.naming import API_VERSION
from deploy.controller.manifests.ray_cluster import revision_in
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.dying_operator import FOLDER_VARIABLE
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.kuberay import KubeRay
from tests.k8s.operating import eventually
from tests.k8s.patches import check_patches
from tests.k8s.streaming import streaming
from tests.k8s.test_rolling import POOLS, change, is_whole, live_of, most_pods, revisions
from tests.k8s.test_serving import FAKE, MODEL, Installed, workers_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.full,
    pytest.mark.timeout(1500),
    pytest.mark.usefixtures("crds", "kubelet", "kuberay"),
]

NUM_TOKENS = 150
QUIET_S = 6.0
"""As long as several of the dying operator's looks: whoever lived through that has nothing left to
do."""
_KILLED = re.compile(r"^killed (before|after) ([A-Za-z]+ \S+):", re.MULTILINE)


class DyingOperator:
    """The release's operator, replaced by one that is killed at every step."""

    def __init__(self, control_plane: ControlPlane, kubelet: Kubelet, namespace: str) -> None:
        self._kubelet = kubelet
        (deployment,) = control_plane.read("deployments", "-n", namespace, "-l", _OPERATOR)["items"]
        container = "/spec/template/spec/containers/0"
        volumes = [{"name": "steps", "emptyDir": {}}]
        patch = [
            {
                "op": "replace",
                "path": f"{container}/command/2",
                "value": "tests.k8s.dying_operator",
            },
            {
                "op": "add",
                "path": f"{container}/env/-",
                "value": {"name": FOLDER_VARIABLE, "value": "/steps"},
            },
            {
                "op": "add",
                "path": f"{container}/volumeMounts",
                "value": [{"name": "steps", "mountPath": "/steps"}],
            },
            {"op": "add", "path": "/spec/template/spec/volumes", "value": volumes},
        ]
        assert not deployment["spec"]["template"]["spec"].get("volumes")
        name = f"deployment/{deployment['metadata']['name']}"
        control_plane.kubectl(
            *("-n", namespace, "patch", name, "--type=json", "-p", json.dumps(patch))
        )
        eventually(self._is_alone, "the dying operator has taken over", 60)

    def _is_alone(self) -> bool:
        pods = self._kubelet.pods(_OPERATOR)
        if len(pods) != 1 or not pods[0]["spec"].get("volumes"):
            return False
        self._pod = str(pods[0]["metadata"]["name"])
        return any(v["name"] == "steps" for v in pods[0]["spec"]["volumes"]) and self.is_ready()

    def is_ready(self) -> bool:
        (pod,) = self._kubelet.pods(_OPERATOR)
        conditions = (pod.get("status") or {}).get("conditions") or ()
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    @property
    def num_lives(self) -> int:
        (pod,) = self._kubelet.pods(_OPERATOR)
        return 1 + int(pod["status"]["containerStatuses"][0]["restartCount"])

    def kills(self) -> list[tuple[str, str]]:
        """Before or after what it was killed, in order."""
        logs = (self._kubelet.log(self._pod, f"operator-{n}") for n in range(self.num_lives))
        return [found for log in logs for found in _KILLED.findall(log)]


_OPERATOR = "app.kubernetes.io/component=operator"


def has_settled(installed: Installed, operator: DyingOperator, **replicas: int) -> bool:
    """Pools are as wanted, all of them of their newest version, and their operator lives on, with
    nothing left to do."""
    for pool, wanted in replicas.items():
        status = installed.read(f"wp/{pool}").get("status", {})
        if not is_whole(installed, pool, wanted) or status.get("draining"):
            return False
    lives, ends_at = operator.num_lives, time.monotonic() + QUIET_S
    while time.monotonic() < ends_at:
        if operator.num_lives != lives or not operator.is_ready():
            return False
        time.sleep(0.5)
    return True


def test_an_operator_that_is_killed_at_every_step_scales_out_and_in_and_no_stream_changes(
    control_plane: ControlPlane,
    namespace: str,
    kubelet: Kubelet,
    kuberay: KubeRay,
    tmp_path: Path,
) -> None:
    installed = Installed(control_plane, namespace, tmp_path)
    installed.install(
        model={"name": str(MODEL)},
        engine=FAKE,
        router={"replicas": 1, "settings": {"localPrefill": "never"}},
    )
    installed.wait_available()
    first = workers_of(kubelet, "decode")
    operator = DyingOperator(control_plane, kubelet, namespace)
    kills: list[tuple[str, str]] = []
    num_specs = len(kuberay.specs("default"))
    with streaming(kubelet, NUM_TOKENS) as streams:
        for replicas in (3, 1):
            began_at = time.monotonic()
            installed.scale("decode", replicas)

            def is_done(replicas: int = replicas) -> bool:
                streams.check()
                return has_settled(installed, operator, decode=replicas)

            eventually(is_done, f"the pool has {replicas} workers", 300)
            new = operator.kills()[len(kills) :]
            kills += new
            _tell(f"to {replicas}", began_at, new)
            for begin in ("SetReplicas decode-", f"PATCH {_ray_cluster(namespace)}"):
                moments = {moment for moment, step in new if step.startswith(begin)}
                assert moments == {"before", "after"}, begin
    assert streams.num_rounds > 2
    assert workers_of(kubelet, "decode") == first, "the one that serves stays"
    check_killed_at_each_patch(kuberay, num_specs, namespace, kills)


def test_an_operator_that_is_killed_at_every_step_rolls_a_pool_and_no_stream_changes(
    control_plane: ControlPlane,
    namespace: str,
    kubelet: Kubelet,
    kuberay: KubeRay,
    tmp_path: Path,
) -> None:
    installed = Installed(control_plane, namespace, tmp_path)
    installed.install(
        model={"name": str(MODEL)},
        engine=FAKE,
        pools=POOLS,
        router={"replicas": 1, "settings": {"localPrefill": "never"}},
    )
    installed.wait_available()
    eventually(lambda: is_whole(installed, "decode", 2), "both decode workers are live", 150)
    (before,) = revisions(installed, "decode")
    operator = DyingOperator(control_plane, kubelet, namespace)
    num_specs = len(kuberay.specs("default"))
    running = streaming(kubelet, NUM_TOKENS)
    with running as streams, live_of(kubelet, "decode") as live:
        began_at = time.monotonic()
        change(control_plane, namespace, decode={"engine": {"maxNumSeqs": 48}})

        def is_done() -> bool:
            streams.check()
            is_over = before not in revisions(installed, "decode")
            return is_over and has_settled(installed, operator, decode=2)

        eventually(is_done, "both workers are of the new version", 1200)
    kills = operator.kills()
    _tell("rolled", began_at, kills)
    ray_cluster = f"PATCH {_ray_cluster(namespace)}"
    for begin in ("AddPool decode-", "SetReplicas decode-", "RemovePool decode-", ray_cluster):
        moments = {moment for moment, step in kills if step.startswith(begin)}
        assert moments == {"before", "after"}, begin
    assert live.fewest == 2, "maxUnavailable is 0"
    assert most_pods(kuberay, "decode") == 3, "maxSurge is 1"
    check_killed_at_each_patch(kuberay, num_specs, namespace, kills)


def test_an_operator_that_is_killed_at_every_step_has_a_cohort_take_over_and_no_stream_changes(
    control_plane: ControlPlane,
    namespace: str,
    kubelet: Kubelet,
    kuberay: KubeRay,
    tmp_path: Path,
) -> None:
    installed = Installed(control_plane, namespace, tmp_path)
    installed.install(
        model={"name": str(MODEL)},
        engine=FAKE,
        router={"replicas": 1, "settings": {"localPrefill": "never"}},
        # The machine is busy with operators that start: nobody's tokens come at their own pace.
        rollout={"weights": [50, 100], "step": "1s", "maxItlFactor": 100},
    )
    installed.wait_available()
    pools = ("prefill", "decode")
    former = {revision for pool in pools for revision in revisions(installed, pool)}
    operator, shares = DyingOperator(control_plane, kubelet, namespace), Shares(installed)
    num_specs = len(kuberay.specs("default"))
    with streaming(kubelet, NUM_TOKENS) as streams:
        began_at, num_earlier = time.monotonic(), len(operator.kills())
        block_size = json.dumps({"spec": {"engine": {"blockSize": 32}}})
        control_plane.kubectl(
            *("-n", namespace, "patch", "servingcluster/default", "--type=merge", "-p", block_size)
        )

        def is_done() -> bool:
            streams.check()
            is_over = shares.is_over() and former.isdisjoint(
                revision for pool in pools for revision in revisions(installed, pool)
            )
            return is_over and has_settled(installed, operator, prefill=1, decode=1)

        eventually(is_done, "both pools are of the new cohort", 1300)
    kills = operator.kills()[num_earlier:]
    _tell("taken over", began_at, kills)
    assert shares.told == [0, 50, 100, 0], "the last is that of none that is to come"
    of_pools = (f"{call} {pool}-" for call in ("AddPool", "RemovePool") for pool in pools)
    status = f"/apis/{API_VERSION}/namespaces/{namespace}/servingclusters/default/status"
    steps = ("SetCohortWeights ", f"PATCH {status}", f"PATCH {_ray_cluster(namespace)}")
    for begin in (*of_pools, *steps):
        moments = {moment for moment, step in kills if step.startswith(begin)}
        assert moments == {"before", "after"}, begin
    groups = kuberay.specs("default")[-1]["workerGroupSpecs"]
    assert {revision_in(group).pool for group in groups} == set(pools)
    assert former.isdisjoint(group["groupName"] for group in groups)
    check_killed_at_each_patch(kuberay, num_specs, namespace, kills)


def check_killed_at_each_patch(
    kuberay: KubeRay, num_specs: int, namespace: str, kills: list[tuple[str, str]]
) -> None:
    """Before and after each of them, and whatever was patched by whoever came next is sound.
    `num_specs`: those of the time before it was killed."""
    check_patches(kuberay)
    patch = f"PATCH {_ray_cluster(namespace)}"
    num_changes = len(kuberay.specs("default")) - num_specs
    num_before, num_after = (kills.count((moment, patch)) for moment in ("before", "after"))
    assert num_after == num_changes
    assert num_before >= num_changes, "a successor may see more, and patch something else"


class Shares:
    """Of new requests, in percent, that the status gave to the cohort that is to take over: each
    once."""

    def __init__(self, installed: Installed) -> None:
        self._installed = installed
        self._former = self._cohort()["serving"]
        self.told: list[int] = []

    def is_over(self) -> bool:
        """Another one serves than at first."""
        cohort = self._cohort()
        assert not cohort.get("isFault"), cohort
        if self.told[-1:] != [cohort["weight"]]:
            self.told.append(cohort["weight"])
        return bool(cohort["phase"] == "Serving" and cohort["serving"] != self._former)

    def _cohort(self) -> dict[str, Any]:
        found: dict[str, Any] = self._installed.read("servingcluster/default")["status"]["cohort"]
        return found


def _tell(what: str, began_at: float, kills: list[tuple[str, str]]) -> None:
    print(f"{what}: {time.monotonic() - began_at:.0f} s, {len(kills)} kills")
    print("\n".join(f"  {moment} {step}" for moment, step in kills))


def _ray_cluster(namespace: str) -> str:
    return f"/apis/ray.io/v1/namespaces/{namespace}/rayclusters/default"
