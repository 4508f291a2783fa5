"""A drain that takes longer than its pool lets it says what holds it, while it goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from baton.client import AsyncClient
from baton.client.events import Tokens
from tests.k8s.installed import (
    PREFILL_AND_TWO_DECODE,
    Installed,
    on_pods,
    router_address,
    workers_of,
)
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.operating import eventually
from tests.k8s.streaming import prompt_of

pytestmark = on_pods(900)

NUM_STREAMS = 8
NUM_TOKENS = 600
DRAIN_TIMEOUT = "20s"
"""A drain is overdue half a minute later."""
PATIENT: dict[str, dict[str, Any]] = {
    "registry": {"goneAfterSeconds": 700},
    "supervisor": {"fenceAfterSeconds": 600},
}
"""Nobody ends a worker that hangs."""


async def ask(address: str, begun: list[int]) -> list[int]:
    """How many tokens each of some streams got. `begun`: those that have some."""

    async def stream(client: AsyncClient, number: int) -> int:
        num_tokens = 0
        async for event in client.generate(
            token_ids=prompt_of(number), max_tokens=NUM_TOKENS, ignore_eos=True
        ):
            if isinstance(event, Tokens):
                if not num_tokens:
                    begun.append(number)
                num_tokens += len(event.ids)
        return num_tokens

    async with AsyncClient(address) as client:
        return await asyncio.gather(*(stream(client, number) for number in range(NUM_STREAMS)))


def check(installed: Installed, kubelet: Kubelet, workers: Mapping[str, str]) -> None:
    (drain,) = eventually(installed.draining, "one drains")
    pod = workers[drain["worker"]]
    (pid,) = kubelet.container(pod).pids("ray::RankActor")
    os.kill(pid, signal.SIGSTOP)
    try:
        held = lambda: [each for each in installed.draining() if "heldBy" in each]  # noqa: E731
        (drain,) = eventually(held, "what holds the drain is reported", 120)
        assert drain["pod"] == pod
        assert drain["heldBy"].startswith("it is stuck or silent, ")
        described = installed.kubectl("describe", "wp/decode")
        (line,) = [line for line in described.splitlines() if "DrainOverdue" in line]
        assert "Warning" in line
        assert f"worker {drain['worker']} in pod {pod} does not finish its drain" in line
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: not installed.draining(), "it ends", 180)
    assert set(workers_of(kubelet, "decode")) == set(workers) - {drain["worker"]}


def test_a_worker_that_hangs_in_its_drain_is_reported_with_what_holds_it(
    installed: Installed, kubelet: Kubelet
) -> None:
    decode = PREFILL_AND_TWO_DECODE["decode"] | {"drainTimeout": DRAIN_TIMEOUT}
    installed.serve(PREFILL_AND_TWO_DECODE | {"decode": decode}, advanced=PATIENT)
    workers, begun = workers_of(kubelet, "decode"), list[int]()
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(asyncio.run, ask(router_address(kubelet), begun))
        eventually(lambda: len(begun) == NUM_STREAMS, "all streams run")
        installed.scale("decode", 1)
        check(installed, kubelet, workers)
        assert asking.result(300) == [NUM_TOKENS] * NUM_STREAMS, "streams go on elsewhere"
