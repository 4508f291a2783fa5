"""The operator is killed at random moments while a pool is scaled in and while another unit takes
over: whoever comes next goes on, and no stream changes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.kuberay import KubeRay
from tests.k8s.kubelet.objects import name_of, num_restarts
from tests.k8s.operating import eventually
from tests.k8s.patches import check_patches
from tests.k8s.streaming import streaming
from tests.k8s.test_pools_change import is_whole, unit_named
from tests.k8s.test_rollout import patch
from tests.k8s.test_serving import FAKE, MODEL, Installed, with_engine
from tests.k8s.units import units_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.full,
    pytest.mark.timeout(1500),
    pytest.mark.usefixtures("crds", "kubelet", "kuberay"),
]

NUM_TOKENS = 150
NUM_KILLS = 10
LIVES_S = (0.2, 6.0)
"""How long an operator lives that has been started: it begins to look after about two seconds."""
_OPERATOR = "app.kubernetes.io/component=operator"


def kill_until(kubelet: Kubelet, is_over: Callable[[], bool], seed: int) -> int:
    """Kill the operator again and again, `NUM_KILLS` times, then let it finish. How often it was
    killed before that which it did was over."""
    drawn, num_useful = random.Random(seed), 0
    print(f"seed {seed}")
    for _ in range(NUM_KILLS):
        ends_at = time.monotonic() + drawn.uniform(*LIVES_S)
        eventually(lambda at=ends_at: time.monotonic() > at, "it has lived", 2 * LIVES_S[1])
        num_useful += not is_over()
        (pod,) = kubelet.pods(_OPERATOR)
        restarts = num_restarts(kubelet, _OPERATOR)
        kubelet.container(name_of(pod)).kill()
        is_new = lambda n=restarts: num_restarts(kubelet, _OPERATOR) > n  # noqa: E731
        eventually(is_new, "another one is started", 60)
    eventually(is_over, "the last one finishes", 900)
    return num_useful


@pytest.mark.parametrize("change", ["scale-in", "rollout"])
def test_whoever_comes_after_an_operator_that_was_killed_goes_on(
    control_plane: ControlPlane,
    namespace: str,
    kubelet: Kubelet,
    kuberay: KubeRay,
    tmp_path: Path,
    change: str,
) -> None:
    size = 3 if change == "scale-in" else 1
    pools = {
        "prefill": {"role": "prefill"},
        "decode": {"role": "decode", "initialReplicas": size},
    }
    installed = Installed(control_plane, namespace, tmp_path)
    installed.install(
        model={"name": str(MODEL)},
        pools=pools,
        **with_engine(FAKE, router={"localPrefill": "never"}),
        router={"replicas": 1},
    )
    installed.wait_available()
    eventually(lambda: is_whole(installed, "decode", size), "all workers are live", 150)
    before = unit_named(installed)
    with streaming(kubelet, NUM_TOKENS) as streams:
        if change == "scale-in":
            installed.scale("decode", 1)
        else:
            patch(installed, control_plane, {"images": {"worker": "baton-worker:2"}})

        def is_over() -> bool:
            streams.check()
            units = units_of(control_plane, namespace)
            assert 1 <= len(units) <= 2
            is_other = change == "scale-in" or unit_named(installed) not in (before, "None")
            return is_other and len(units) == 1 and is_whole(installed, "decode", 1)

        num_useful = kill_until(kubelet, is_over, seed=time.monotonic_ns() % 10_000)
    print(f"{change}: {num_useful} of {NUM_KILLS} kills before it was over")
    assert num_useful
    assert streams.num_rounds > 1
    check_patches(kuberay)
