"""The operator is killed right before and right after everything that it does to scale a pool, and
to have another unit take over."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.dying_operator import FOLDER_VARIABLE
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.kuberay import KubeRay
from tests.k8s.operating import eventually
from tests.k8s.patches import check_patches
from tests.k8s.streaming import streaming
from tests.k8s.test_pools_change import change, is_whole, unit_named
from tests.k8s.test_serving import FAKE, MODEL, Installed, with_engine, workers_of
from tests.k8s.units import unit_of, units_of

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
    """Pools are as wanted, and their operator lives on, with nothing left to do."""
    for pool, wanted in replicas.items():
        if not is_whole(installed, pool, wanted):
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
        **with_engine(FAKE, router={"localPrefill": "never"}),
        router={"replicas": 1},
    )
    installed.wait_available()
    first = workers_of(kubelet, "decode")
    operator = DyingOperator(control_plane, kubelet, namespace)
    ray_cluster = _ray_cluster(control_plane, namespace)
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
            for begin in ("SetReplicas decode", f"PATCH {ray_cluster}"):
                moments = {moment for moment, step in new if step.startswith(begin)}
                assert moments == {"before", "after"}, begin
    assert streams.num_rounds > 2
    assert workers_of(kubelet, "decode") == first, "the one that serves stays"
    check_killed_at_each_patch(kuberay, num_specs, ray_cluster, kills)


def test_an_operator_that_is_killed_at_every_step_has_another_unit_take_over(
    control_plane: ControlPlane,
    namespace: str,
    kubelet: Kubelet,
    kuberay: KubeRay,
    tmp_path: Path,
) -> None:
    installed = Installed(control_plane, namespace, tmp_path)
    installed.install(
        model={"name": str(MODEL)},
        **with_engine(FAKE, router={"localPrefill": "never"}),
        router={"replicas": 1},
    )
    installed.wait_available()
    before, operator = unit_named(installed), DyingOperator(control_plane, kubelet, namespace)
    began_at = time.monotonic()
    change(control_plane, namespace, decode={"engine": {"maxNumSeqs": 48}})

    def is_done() -> bool:
        assert len(units_of(control_plane, namespace)) <= 1, "never two units"
        is_over = unit_named(installed) not in (before, "None")
        return is_over and has_settled(installed, operator, prefill=1, decode=1)

    eventually(is_done, "another unit serves", 1200)
    kills = operator.kills()
    _tell("another unit", began_at, kills)
    rays = f"/apis/ray.io/v1/namespaces/{namespace}/rayclusters/default-"
    for begin in ("SetReplicas decode", f"PATCH {rays}", f"DELETE {rays}", "AddPool decode"):
        moments = {moment for moment, step in kills if step.startswith(begin)}
        assert moments == {"before", "after"}, begin
    check_patches(kuberay)


def check_killed_at_each_patch(
    kuberay: KubeRay, num_specs: int, ray_cluster: str, kills: list[tuple[str, str]]
) -> None:
    """Before and after each of them, and whatever was patched by whoever came next is sound.
    `num_specs`: those of the time before it was killed."""
    check_patches(kuberay)
    patch = f"PATCH {ray_cluster}"
    num_changes = len(kuberay.specs("default")) - num_specs
    num_before, num_after = (kills.count((moment, patch)) for moment in ("before", "after"))
    assert num_after == num_changes
    assert num_before >= num_changes, "a successor may see more, and patch something else"


def _tell(what: str, began_at: float, kills: list[tuple[str, str]]) -> None:
    print(f"{what}: {time.monotonic() - began_at:.0f} s, {len(kills)} kills")
    print("\n".join(f"  {moment} {step}" for moment, step in kills))


def _ray_cluster(control_plane: ControlPlane, namespace: str) -> str:
    unit = unit_of(control_plane, namespace)
    assert unit
    return f"/apis/ray.io/v1/namespaces/{namespace}/rayclusters/{unit['metadata']['name']}"
