"""`helm test`: the chart's preflight, run by pods as a cluster runs them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from deploy.api.generate import CHART
from tests.deploy.chart.chart import NO_HELM
from tests.k8s.control_plane.errors import CommandError
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.kubelet import Kubelet

pytestmark = [pytest.mark.full, pytest.mark.timeout(400), pytest.mark.usefixtures("crds")]

_TEST_S = 150.0


class Release:
    """The chart with one pool and nobody who would make pods of it: the preflight asks nobody."""

    def __init__(self, control_plane: ControlPlane, namespace: str, folder: Path) -> None:
        self._control_plane, self._namespace, self._folder = control_plane, namespace, folder

    def install(self, **pool: Any) -> None:
        pools = {"prefill": None, "decode": {"role": "decode"} | pool}
        spec = {"model": {"name": "models/demo"}, "pools": pools}
        values = {
            "watchNamespaces": [self._namespace],
            "crds": {"upgrade": False},
            "operator": {"replicas": 0},
            "cluster": {
                "enabled": True,
                "nodes": {"preset": "cpu"},
                "redis": {"enabled": False},  # nothing here runs its image
                "spec": spec,
            },
        }
        path = self._folder / "values.json"
        path.write_text(json.dumps(values))
        self._helm("install", CHART, "--skip-crds", "-f", path)

    def test(self) -> str:
        """Raises CommandError where a Job fails."""
        return self._helm("test", "--timeout", f"{_TEST_S:g}s")

    def _helm(self, verb: str, *arguments: Any) -> str:
        return self._control_plane.helm(
            verb, "baton", *arguments, "-n", self._namespace, timeout_s=_TEST_S + 30
        )


@pytest.fixture
def release(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Release:
    if control_plane.clients.helm is None:
        pytest.skip(NO_HELM)
    return Release(control_plane, namespace, tmp_path)


def said(kubelet: Kubelet) -> str:
    (pod,) = kubelet.pods("app.kubernetes.io/component=preflight")
    return kubelet.log(pod["metadata"]["name"], "preflight-0")


def test_a_pod_of_this_machine_hands_over_kv_and_passes(release: Release, kubelet: Kubelet) -> None:
    release.install()
    assert re.search(r"Phase: +Succeeded", release.test())
    told = said(kubelet)
    assert re.search(r"^handoff +ok +68 MB at [0-9.]+ GB/s over .*sysv", told, re.MULTILINE)
    assert "failure" not in told


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="a driver is here")
def test_what_a_pods_node_lacks_fails_the_test_and_is_told_with_what_mends_it(
    release: Release, kubelet: Kubelet
) -> None:
    release.install(engine={"device": "cuda"}, template=without_the_gpus_resource())
    with pytest.raises(CommandError):
        release.test()
    told = said(kubelet)
    assert re.search(r"^driver +failure +no NVIDIA driver here\n +fix +install it", told, re.M)


def without_the_gpus_resource() -> dict[str, Any]:
    """No node here has GPUs to ask for."""
    none = {"nvidia.com/gpu": None}
    worker = {"name": "ray-worker", "resources": {"requests": none, "limits": none}}
    return {"spec": {"containers": [worker]}}
