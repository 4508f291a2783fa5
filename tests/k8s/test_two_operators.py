"""Two operators, of which one leads: it stands still in the middle of a scale-in, under 50 streams,
and goes on when the other one has taken over."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.hosts import is_ready
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.kuberay import KubeRay
from tests.k8s.kubelet.objects import name_of, num_restarts
from tests.k8s.operating import eventually
from tests.k8s.patches import check_patches
from tests.k8s.streaming import streaming
from tests.k8s.telling_operator import MARK
from tests.k8s.test_serving import FAKE, MODEL, Installed, with_engine
from tests.k8s.units import group_sizes_in

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("crds", "kubelet", "kuberay"),
]

NUM_TOKENS = 1000
"""Streams outlast the lease: there is something left to be done when the other one has it."""
TAKEN_OVER_WITHIN_S = 30.0
OPERATOR = "app.kubernetes.io/component=operator"
TELLING = "tests.k8s.telling_operator"


class Operators:
    """The release's two, and who leads."""

    def __init__(self, control_plane: ControlPlane, installed: Installed, kubelet: Kubelet) -> None:
        self._installed, self._kubelet = installed, kubelet
        namespace = installed.namespace
        (found,) = control_plane.read("deployments", "-n", namespace, "-l", OPERATOR)["items"]
        command = "/spec/template/spec/containers/0/command/2"
        patch = [
            {"op": "replace", "path": command, "value": TELLING},
            {"op": "replace", "path": "/spec/replicas", "value": 2},
        ]
        name = f"deployment/{found['metadata']['name']}"
        control_plane.kubectl(
            *("-n", namespace, "patch", name, "--type=json", "-p", json.dumps(patch))
        )

    def are_ready(self) -> bool:
        """Both, one of which leads."""
        pods = self._kubelet.pods(OPERATOR)
        commands = [pod["spec"]["containers"][0]["command"][2] for pod in pods]
        return commands == [TELLING] * 2 and all(map(is_ready, pods)) and bool(self.leader())

    def leader(self) -> str:
        """Its pod; empty: nobody."""
        holder = str(self.lease().get("holderIdentity") or "")
        names = map(name_of, self._kubelet.pods(OPERATOR))
        return next((name for name in names if holder.startswith(f"{name}-")), "")

    def lease(self) -> dict[str, Any]:
        found: dict[str, Any] = self._installed.read("lease/baton-controller")["spec"]
        return found

    def send(self, pod: str, number: signal.Signals) -> None:
        (pid,) = self._kubelet.container(pod).pids("python")
        os.kill(pid, number)

    def said(self, pod: str) -> str:
        return self._kubelet.log(pod, "operator-0")


def writes_in(said: str) -> list[str]:
    """What has happened is told by whoever has seen it, and all ask for the lease."""
    asked = [line for line in said.splitlines() if line.startswith(MARK)]
    return [line for line in asked if not {"events", "leases"} & set(line.split("/"))]


def decode_pods(installed: Installed) -> int:
    """That KubeRay is asked for."""
    (unit,) = installed.read("rayclusters.ray.io")["items"]
    return group_sizes_in(unit)["decode"]


def test_who_stood_still_in_a_scale_in_does_not_act_and_the_other_one_ends_it(
    control_plane: ControlPlane, namespace: str, kubelet: Kubelet, kuberay: KubeRay, tmp_path: Path
) -> None:
    installed = Installed(control_plane, namespace, tmp_path)
    installed.install(
        model={"name": str(MODEL)},
        **with_engine(FAKE, router={"localPrefill": "never"}),
        pools={"prefill": {"role": "prefill"}, "decode": {"role": "decode", "initialReplicas": 3}},
        router={"replicas": 1},
    )
    operators = Operators(control_plane, installed, kubelet)
    installed.wait_available()
    eventually(operators.are_ready, "two operators", 60)

    def has(replicas: int) -> bool:
        status = installed.read("wp/decode").get("status", {})
        told = [status.get(name) for name in ("readyReplicas", "replicas")]
        return told == [replicas] * 2 and not status.get("draining")

    eventually(lambda: has(3), "three decode workers", 150)
    with streaming(kubelet, NUM_TOKENS) as streams:
        former, before = operators.leader(), operators.lease()
        assert writes_in(operators.said(former)), "its writes are seen"
        streams.wait_round()
        installed.scale("decode", 1)
        drains = lambda: len(installed.read("wp/decode")["status"].get("draining") or ()) == 2  # noqa: E731
        eventually(drains, "two workers drain", 30)
        operators.send(former, signal.SIGSTOP)
        num_said = len(operators.said(former))
        other = lambda: operators.leader() not in ("", former)  # noqa: E731
        eventually(other, "the other one leads", TAKEN_OVER_WITHIN_S)
        assert decode_pods(installed) == 3, "no pod goes while streams run on it"
        operators.send(former, signal.SIGCONT)

        def is_over() -> bool:
            streams.check()
            return has(1)

        eventually(is_over, "the other one ends the scale-in", 240)
        streams.enough()
    lease, said = operators.lease(), operators.said(former)[num_said:]
    assert operators.leader() not in ("", former)
    assert lease["leaseTransitions"] == before.get("leaseTransitions", 0) + 1
    assert num_restarts(kubelet, OPERATOR) == 0, "it has lived through it"
    assert "has lost the lease" in said
    assert writes_in(said) == []
    assert len(check_patches(kuberay)) == 2
