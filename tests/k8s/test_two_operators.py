"""Two operators, of which one leads: it stands still in the middle of a scale-in, under 50 streams,
and goes on when the other one has taken over."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from tests.k8s.installed import OPERATOR, Installed, check_patches, on_pods
from tests.k8s.kubelet.hosts import is_ready
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.kuberay import KubeRay
from tests.k8s.kubelet.objects import name_of, num_restarts
from tests.k8s.logging_operator import MARK
from tests.k8s.operating import eventually
from tests.k8s.streaming import streaming

pytestmark = on_pods(900)

NUM_TOKENS = 1000
"""Streams outlast the lease: there is something left to be done when the other one has it."""
TAKEN_OVER_WITHIN_S = 30.0
LOGGING = "tests.k8s.logging_operator"


class Operators:
    """The release's two, and which one leads."""

    def __init__(self, installed: Installed, kubelet: Kubelet) -> None:
        self._installed, self._kubelet = installed, kubelet
        command = "/spec/template/spec/containers/0/command/2"
        patch = json.dumps([
            {"op": "replace", "path": command, "value": LOGGING},
            {"op": "replace", "path": "/spec/replicas", "value": 2},
        ])  # fmt: skip
        (name,) = installed.kubectl("get", "deployment", "-l", OPERATOR, "-o", "name").split()
        installed.kubectl("patch", name, "--type=json", "-p", patch)

    def are_ready(self) -> bool:
        """Both, one of which leads."""
        pods = self._kubelet.pods(OPERATOR)
        commands = [pod["spec"]["containers"][0]["command"][2] for pod in pods]
        return commands == [LOGGING] * 2 and all(map(is_ready, pods)) and bool(self.leader())

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
    """Without events and the lease, which every operator may write."""
    asked = [line for line in said.splitlines() if line.startswith(MARK)]
    return [line for line in asked if not {"events", "leases"} & set(line.split("/"))]


def test_a_leader_that_stood_still_in_a_scale_in_does_not_act_and_the_other_one_ends_it(
    installed: Installed, kubelet: Kubelet, kuberay: KubeRay
) -> None:
    decode = {"role": "decode", "initialReplicas": 3}
    installed.serve({"prefill": {"role": "prefill"}, "decode": decode})
    operators = Operators(installed, kubelet)
    eventually(operators.are_ready, "two operators")
    with streaming(kubelet, NUM_TOKENS) as streams:
        former = operators.leader()
        assert writes_in(operators.said(former)), "its writes are seen"
        streams.wait_round()
        installed.scale("decode", 1)
        eventually(lambda: len(installed.draining()) == 2, "two workers drain", 30)
        operators.send(former, signal.SIGSTOP)
        num_said = len(operators.said(former))
        other = lambda: operators.leader() not in ("", former)  # noqa: E731
        eventually(other, "the other one leads", TAKEN_OVER_WITHIN_S)
        assert installed.group_sizes()["decode"] == 3, "no pod goes while streams run on it"
        operators.send(former, signal.SIGCONT)

        is_over = lambda: installed.is_whole("decode", 1)  # noqa: E731
        streams.wait(is_over, "the other one ends the scale-in", 240)
        streams.enough()
    said = operators.said(former)[num_said:]
    assert operators.leader() not in ("", former)
    assert num_restarts(kubelet, OPERATOR) == 0, "it has lived through it"
    assert "has lost the lease" in said
    assert writes_in(said) == []
    assert len(check_patches(kuberay)) == 2
