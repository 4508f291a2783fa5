"""The operator is killed at random moments while a pool is scaled in and while another unit takes
over: its successor goes on, and no stream changes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from tests.k8s.installed import OPERATOR, Installed, check_patches, on_pods
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.kuberay import KubeRay
from tests.k8s.kubelet.objects import name_of, num_restarts
from tests.k8s.operating import eventually
from tests.k8s.streaming import streaming

pytestmark = on_pods(1500)

NUM_TOKENS = 150
NUM_KILLS = 10
LIVES_S = (0.2, 6.0)
"""How long an operator lives that has been started: it begins to look after about two seconds."""


def kill_until(kubelet: Kubelet, is_over: Callable[[], bool], seed: int) -> int:
    """Kill the operator `NUM_KILLS` times, then let it finish. How often it was killed before its
    work was over."""
    drawn, num_useful = random.Random(seed), 0
    print(f"seed {seed}")
    for _ in range(NUM_KILLS):
        time.sleep(drawn.uniform(*LIVES_S))
        num_useful += not is_over()
        (pod,) = kubelet.pods(OPERATOR)
        restarts = num_restarts(kubelet, OPERATOR)
        kubelet.container(name_of(pod)).kill()
        is_new = lambda n=restarts: num_restarts(kubelet, OPERATOR) > n  # noqa: E731
        eventually(is_new, "another one is started")
    eventually(is_over, "the last one finishes", 900)
    return num_useful


@pytest.mark.parametrize("change", ["scale-in", "rollout"])
def test_the_successor_of_an_operator_that_was_killed_goes_on(
    installed: Installed,
    kubelet: Kubelet,
    kuberay: KubeRay,
    change: str,
) -> None:
    decode = {"role": "decode", "initialReplicas": 3 if change == "scale-in" else 1}
    installed.serve({"prefill": {"role": "prefill"}, "decode": decode})
    before = installed.rollout()["unit"]
    with streaming(kubelet, NUM_TOKENS) as streams:
        if change == "scale-in":
            installed.scale("decode", 1)
        else:
            installed.change(images={"worker": "baton-worker:2"})

        def is_over() -> bool:
            streams.check()
            units = installed.units()
            assert 1 <= len(units) <= 2
            is_other = change == "scale-in" or installed.rollout()["unit"] not in (before, "")
            return is_other and len(units) == 1 and installed.is_whole("decode", 1)

        num_useful = kill_until(kubelet, is_over, seed=time.monotonic_ns() % 10_000)
    print(f"{change}: {num_useful} of {NUM_KILLS} kills before it was over")
    assert num_useful
    assert streams.num_rounds > 1
    check_patches(kuberay)
