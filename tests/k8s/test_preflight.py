"""`helm test`: the chart's preflight, run by pods as a cluster runs them. The two nodes are
names on one kernel: a real one would not let them share memory."""

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
from tests.k8s.plugin import Plugin

pytestmark = [pytest.mark.full, pytest.mark.timeout(400), pytest.mark.usefixtures("crds")]

_TEST_S = 150.0


POOLS: dict[str, Any] = {"prefill": {"role": "prefill"}, "decode": {"role": "decode"}}


def install(installed: Installed, **pool: Any) -> None:
    """A release with nobody who would make pods of it: the preflight asks nobody."""
    installed.values = {"operator": {"replicas": 0}}
    pools = {name: role | pool for name, role in POOLS.items()}
    installed.install(model={"name": "models/demo"}, pools=pools)


def helm_test(control_plane: ControlPlane, installed: Installed) -> None:
    """Raises CommandError where a Job fails."""
    options = ("-n", installed.namespace, "--timeout", f"{_TEST_S:g}s")
    said = control_plane.helm("test", "baton", *options, timeout_s=_TEST_S + 30)
    assert re.search(r"Phase: +Succeeded", said)


def rows(kubelet: Kubelet, pool: str) -> tuple[str, dict[str, str]]:
    """The node of that pool's pod, and its rows by name; a fix follows in the same."""
    (pod,) = kubelet.pods(f"baton.dev/preflight={pool}")
    found: dict[str, str] = {}
    for line in kubelet.log(pod["metadata"]["name"], "preflight-0").splitlines():
        name = line[:13].strip() or list(found)[-1]
        found[name] = found.get(name, "") + line[13:].strip() + "\n"
    return pod["spec"]["nodeName"], found


@pytest.fixture
def helm_at_hand(control_plane: ControlPlane) -> None:
    if control_plane.clients.helm is None:
        pytest.skip(NO_HELM)


@pytest.mark.usefixtures("helm_at_hand")
def test_two_nodes_hand_over_kv_by_tcp(
    control_plane: ControlPlane, installed: Installed, kubelet: Kubelet
) -> None:
    install(installed, env=[{"name": "UCX_TLS", "value": "tcp,self"}])
    helm_test(control_plane, installed)
    (here, sent), (there, received) = rows(kubelet, "prefill"), rows(kubelet, "decode")
    assert {here, there} == {"node-a", "node-b"}
    assert sent["pair"] == f"PASS  {here} to {there}\n"
    assert received["pair"] == f"PASS  received from {here}, which judges it\n"
    assert sent["transport"] == "PASS  tcp: no RDMA adapter is here\n"
    assert re.match(r"(PASS|WARN)  68 MB at [0-9.]+ GB/s; the link's own speed", sent["bandwidth"])
    assert sent["handoff"].startswith("WARN  68 MB")  # within the pod, too, by TCP
    assert "UCX_TLS" in sent["handoff"]


@pytest.mark.usefixtures("helm_at_hand")
def test_a_pair_on_one_node_is_a_warning(
    control_plane: ControlPlane, installed: Installed, kubelet: Kubelet
) -> None:
    install(installed, nodeSelector={"kubernetes.io/hostname": "node-b"})
    helm_test(control_plane, installed)
    _, sent = rows(kubelet, "prefill")
    assert re.match(r"PASS  68 MB at [0-9.]+ GB/s over .*sysv", sent["handoff"])
    assert sent["pair"].startswith("WARN  both pods are on node-b, ")
    assert "\nfix   free room" in sent["pair"]


@pytest.mark.usefixtures("helm_at_hand")
@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="a driver is here")
def test_what_a_pods_node_lacks_fails_the_test_and_is_reported_with_what_mends_it(
    control_plane: ControlPlane, installed: Installed, kubelet: Kubelet
) -> None:
    none = {"nvidia.com/gpu": None}  # no node here has GPUs to ask for
    worker = {"name": "ray-worker", "resources": {"requests": none, "limits": none}}
    template = {"spec": {"containers": [worker]}}
    install(installed, engine={"device": "cuda"}, podTemplate=template)
    with pytest.raises(CommandError):
        helm_test(control_plane, installed)
    _, found = rows(kubelet, "prefill")
    assert found["driver"].startswith("FAIL  no NVIDIA driver here\nfix   install it")
    assert found["pair"].startswith("PASS")  # in the CPU's memory


def test_a_cluster_that_helm_did_not_install_is_refused(plugin: Plugin) -> None:
    plugin.make_cluster("green")
    done = plugin("preflight")
    assert done.returncode == 3
    assert "green is not of a Helm release" in done.stderr
    assert "python -m cluster.preflight" in done.stderr
