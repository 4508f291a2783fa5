"""`helm test`: the chart's preflight, run by pods as a cluster runs them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.chart.chart import NO_HELM
from tests.k8s.control_plane.errors import CommandError
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.installed import Installed
from tests.k8s.kubelet.kubelet import Kubelet

pytestmark = [pytest.mark.full, pytest.mark.timeout(400), pytest.mark.usefixtures("crds")]

_TEST_S = 150.0


def helm_test(control_plane: ControlPlane, installed: Installed, **spec: Any) -> str:
    """Of a release with one pool and nobody who would make pods of it: the preflight asks nobody.
    Raises CommandError where a Job fails."""
    if control_plane.clients.helm is None:
        pytest.skip(NO_HELM)
    decode = {"role": "decode"} | spec
    installed.values = {"operator": {"replicas": 0}}
    installed.install(model={"name": "models/demo"}, pools={"prefill": None, "decode": decode})
    options = ("-n", installed.namespace, "--timeout", f"{_TEST_S:g}s")
    return control_plane.helm("test", "baton", *options, timeout_s=_TEST_S + 30)


def log_of(kubelet: Kubelet) -> str:
    (pod,) = kubelet.pods("app.kubernetes.io/component=preflight")
    return kubelet.log(pod["metadata"]["name"], "preflight-0")


def test_a_pod_of_this_machine_hands_over_kv_and_passes(
    control_plane: ControlPlane, installed: Installed, kubelet: Kubelet
) -> None:
    assert re.search(r"Phase: +Succeeded", helm_test(control_plane, installed))
    log = log_of(kubelet)
    assert re.search(r"^handoff +ok +68 MB at [0-9.]+ GB/s over .*sysv", log, re.MULTILINE)
    assert "failure" not in log


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="a driver is here")
def test_what_a_pods_node_lacks_fails_the_test_and_is_reported_with_what_mends_it(
    control_plane: ControlPlane, installed: Installed, kubelet: Kubelet
) -> None:
    none = {"nvidia.com/gpu": None}  # no node here has GPUs to ask for
    worker = {"name": "ray-worker", "resources": {"requests": none, "limits": none}}
    template = {"spec": {"containers": [worker]}}
    with pytest.raises(CommandError):
        helm_test(control_plane, installed, engine={"device": "cuda"}, podTemplate=template)
    driver = r"^driver +failure +no NVIDIA driver here\n +fix +install it"
    assert re.search(driver, log_of(kubelet), re.MULTILINE)
