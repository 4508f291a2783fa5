"""Another model takes over, on real engines and random checkpoints: what runs ends whole with the
first, what is asked meanwhile waits, and is answered by the second. There are never two units."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from baton.client import AsyncClient
from baton.errors import UnavailableError
from deploy.controller.manifests.common import UNIT_LABEL
from tests.engine import checkpoints
from tests.engine.checkpoints import VOCAB
from tests.engine.driving import random_prompt
from tests.k8s.addresses import router_addresses
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.operating import eventually
from tests.k8s.test_serving import Installed
from tests.k8s.units import units_of
from tests.path.oracles import Overrides, greedy_tokens, oracle_model
from tests.path.whole_path import Answer, ask

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.full,
    pytest.mark.timeout(1200),
    pytest.mark.usefixtures("crds", "kuberay"),
]

MODELS: dict[str, tuple[str, Overrides]] = {"first": ("llama", ()), "second": ("qwen2", ())}
"""By the names of their claims."""
ENGINE = {
    "dtype": "float32",
    "numThreads": 1,
    "numBlocks": 512,
    "maxNumSeqs": 16,
    "maxNumBatchedTokens": 64,
}
NUM_AT_ONCE = 3
NUM_PROMPTS = 6
NUM_TOKENS = 48
OVER_WITHIN_S = 400.0
REQUEST_S = 300.0


def model_in(name: str) -> dict[str, Any]:
    return {"claim": {"claimName": f"models-{name}", "path": "model"}}


def prompt_of(number: int) -> list[int]:
    return random_prompt(40 + 17 * number, VOCAB, seed=number)


@pytest.fixture
def models(kubelet: Kubelet) -> None:
    """Checkpoints, each on a claim of its own."""
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    for name, (family, overrides) in MODELS.items():
        folder = kubelet.claim(f"models-{name}") / "model"
        oracle_model(family, overrides).save_pretrained(folder)
        checkpoints.save_tokenizer(folder)
        for file in folder.iterdir():
            file.chmod(0o644)


@dataclass(frozen=True)
class Asked:
    """A request that was answered; `number`: of its prompt."""

    number: int
    began_at: float
    answer: Answer


class Asking:
    """Own a thread on which requests run all the time, `NUM_AT_ONCE` of them, and their answers."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet
        self.answered: list[Asked] = []
        self._is_enough = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="asking")
        self._running = self._thread.submit(asyncio.run, self._ask_all())

    def check(self) -> None:
        """Raises what has failed until now."""
        if self._running.done():
            self._running.result()

    def end(self) -> None:
        """After the requests that run. Raises what failed in any of them."""
        self._is_enough.set()
        self._running.result(REQUEST_S)
        self._thread.shutdown()

    async def _ask_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for first in range(NUM_AT_ONCE):
                group.create_task(self._ask_on(first))

    async def _ask_on(self, first: int) -> None:
        for number in itertools.count(first):
            if self._is_enough.is_set():
                return
            began_at = time.monotonic()
            answer = await self._ask(number, prompt_of(number % NUM_PROMPTS))
            self.answered.append(Asked(number % NUM_PROMPTS, began_at, answer))

    async def _ask(self, number: int, prompt: list[int]) -> Answer:
        """As whoever asks a Service: a router that leaves takes nothing new, the next one does."""
        while True:
            found, streams = await self._routers(), asyncio.Event()
            assert found, "no router is ready"
            address = found[number % len(found)]
            options: dict[str, Any] = {"max_tokens": NUM_TOKENS, "timeout_s": REQUEST_S}
            try:
                async with AsyncClient(address) as client:
                    return await ask(client, prompt, tries=None, streams=streams, **options)
            except UnavailableError:
                if streams.is_set() or address in await self._routers():
                    raise

    async def _routers(self) -> list[str]:
        return await asyncio.to_thread(router_addresses, self._kubelet)


def said_by() -> Mapping[tuple[str, int], list[int]]:
    """To each prompt, by each model alone."""
    return {
        (name, number): greedy_tokens(family, overrides, prompt_of(number), NUM_TOKENS)
        for name, (family, overrides) in MODELS.items()
        for number in range(NUM_PROMPTS)
    }


def test_streams_end_whole_and_what_is_asked_meanwhile_is_answered_by_the_next_unit(
    control_plane: ControlPlane, namespace: str, kubelet: Kubelet, models: None, tmp_path: Path
) -> None:
    installed = Installed(control_plane, namespace, tmp_path)
    installed.install(
        model=model_in("first"),
        servedModelName="both",
        engine=ENGINE,
        router={"replicas": 1, "settings": {"localPrefill": "never", "fleetWaitS": REQUEST_S}},
    )
    installed.wait_available()
    said, states, requests = said_by(), list[str](), Asking(kubelet)

    def model_of(asked: Asked) -> str:
        """Whose every token it is."""
        (model,) = [name for name in MODELS if said[name, asked.number] == asked.answer.ids]
        return model

    def answered_since(moment: float, count: int = 2 * NUM_AT_ONCE) -> list[Asked]:
        requests.check()
        found = [asked for asked in requests.answered if asked.began_at > moment]
        return found if len(found) >= count else []

    def look() -> dict[str, Any]:
        requests.check()
        assert len(units_of(control_plane, namespace)) <= 1, "never two units"
        labels = (pod["metadata"]["labels"] for pod in kubelet.pods(UNIT_LABEL))
        assert len({each[UNIT_LABEL] for each in labels}) <= 1, "nor pods of two"
        status: dict[str, Any] = installed.read("servingcluster/default")["status"]
        state = status["rollout"]["state"]
        if states[-1:] != [state]:
            states.append(state)
        return status

    try:
        eventually(lambda: answered_since(0.0), "the first model answers", REQUEST_S)
        before = look()["unit"]
        changed_at = time.monotonic()
        patch = json.dumps({"spec": {"model": model_in("second")}})
        control_plane.kubectl(
            *("-n", namespace, "patch", "servingcluster/default", "--type=merge", "-p", patch)
        )

        def is_over() -> bool:
            status = look()
            serves = status["rollout"]["state"] == "AsWanted" and status["unit"] != before
            return serves and status["pools"] == {"prefill": "1/1", "decode": "1/1"}

        eventually(is_over, "the second model serves", OVER_WITHIN_S)
        over_at = time.monotonic()
        eventually(lambda: answered_since(over_at), "it answers", REQUEST_S)
    finally:
        requests.end()
    assert states[0] == states[-1] == "AsWanted"
    assert "Draining" in states
    models = [(asked.began_at, model_of(asked)) for asked in requests.answered]
    assert {model for began_at, model in models if began_at < changed_at - 60} <= {"first"}
    assert {model for began_at, model in models if began_at > over_at} == {"second"}
    waited = [asked for asked in requests.answered
              if changed_at < asked.began_at < over_at and model_of(asked) == "second"]  # fmt: skip
    assert waited, "what was asked meanwhile was answered by the second"
    print(f"{len(models)} requests, {len(waited)} waited; {over_at - changed_at:.0f} s; {states}")
