"""A drain that takes longer than its pool lets it says what holds it, while it goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton.client import AsyncClient
from baton.client.events import Tokens
from tests.k8s.addresses import router_addresses
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.operating import eventually
from tests.k8s.streaming import prompt_of
from tests.k8s.test_serving import FAKE, MODEL, Installed, with_engine, workers_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("crds", "kubelet", "kuberay"),
]

NUM_STREAMS = 8
NUM_TOKENS = 600
DRAIN_TIMEOUT = "20s"
"""A drain is overdue half a minute later."""
PATIENT: dict[str, dict[str, Any]] = {
    "router": {"localPrefill": "never"},
    "registry": {"goneAfterSeconds": 600},
    "supervisor": {"fenceAfterSeconds": 600},
}
"""Nobody ends a worker that hangs."""


async def ask(address: str) -> list[int]:
    """How many tokens each of some streams got."""

    async def one(client: AsyncClient, number: int) -> int:
        events = client.generate(
            token_ids=prompt_of(number), max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0
        )
        return sum([len(event.ids) async for event in events if isinstance(event, Tokens)])

    async with AsyncClient(address) as client:
        return list(await asyncio.gather(*(one(client, n) for n in range(NUM_STREAMS))))


def check(
    installed: Installed,
    control_plane: ControlPlane,
    kubelet: Kubelet,
    workers: Mapping[str, str],
    draining: Callable[[], list[dict[str, Any]]],
) -> None:
    (drain,) = eventually(draining, "one drains", 60)
    pod = workers[drain["worker"]]
    (pid,) = kubelet.container(pod).pids("ray::RankActor.")
    os.kill(pid, signal.SIGSTOP)
    try:
        held = lambda: [each for each in draining() if "heldBy" in each]  # noqa: E731
        (drain,) = eventually(held, "what holds the drain is reported", 120)
        assert drain["pod"] == pod
        assert drain["heldBy"].startswith("it is stuck or silent, ")
        described = control_plane.kubectl("-n", installed.namespace, "describe", "wp/decode")
        (line,) = [line for line in described.splitlines() if "DrainOverdue" in line]
        assert "Warning" in line
        assert f"worker {drain['worker']} in pod {pod} does not finish its drain" in line
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: not draining(), "it ends", 180)
    assert set(workers_of(kubelet, "decode")) == set(workers) - {drain["worker"]}


def test_a_worker_that_hangs_in_its_drain_is_reported_with_what_holds_it(
    control_plane: ControlPlane, namespace: str, kubelet: Kubelet, tmp_path: Path
) -> None:
    installed = Installed(control_plane, namespace, tmp_path)
    decode = {"role": "decode", "initialReplicas": 2, "drainTimeout": DRAIN_TIMEOUT}
    installed.install(
        model={"name": str(MODEL)},
        pools={"prefill": {"role": "prefill"}, "decode": decode},
        router={"replicas": 1},
        **with_engine(FAKE, **PATIENT),
    )
    installed.wait_available()
    eventually(lambda: len(workers_of(kubelet, "decode")) == 2, "both workers are live", 150)
    workers = workers_of(kubelet, "decode")

    def draining() -> list[dict[str, Any]]:
        status = installed.read("wp/decode").get("status", {})
        found: list[dict[str, Any]] = status.get("draining") or []
        return found

    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(asyncio.run, ask(router_addresses(kubelet)[0]))
        installed.scale("decode", 1)
        check(installed, control_plane, kubelet, workers, draining)
        assert asking.result(300) == [NUM_TOKENS] * NUM_STREAMS, "streams go on elsewhere"
