"""Another model takes over on one worker, without room for two, while requests come all the time:
what runs ends whole with the first, what is asked meanwhile is answered by the second."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.client import AsyncClient
from baton.client.events import Tokens
from baton.config.cluster import parse_config
from baton.errors import UnavailableError
from deploy.api.naming import snake_keys
from deploy.controller.manifests.common import UNIT_LABEL
from engine.request import RequestId, RequestSpec, SamplingParams
from tests.cluster.whole_cluster import engine_tokens
from tests.k8s.addresses import router_addresses
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.operating import eventually
from tests.k8s.streaming import prompt_of
from tests.k8s.test_serving import MODEL, Installed, with_engine
from tests.k8s.units import units_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.full,
    pytest.mark.timeout(1500),
    pytest.mark.usefixtures("crds", "kuberay"),
]

ENGINES: dict[str, dict[str, Any]] = {
    "first": {"backend": "fake", "fake": {"decodeStepSeconds": 0.05}, "maxNumSeqs": 64},
    "second": {
        "backend": "fake",
        "fake": {"decodeStepSeconds": 0.05, "window": 8},
        "maxNumSeqs": 64,
    },
}
"""By the models' names. A fake engine that looks back less says something else."""
NUM_AT_ONCE = 4
NUM_PROMPTS = 4
NUM_TOKENS = 100
OVER_WITHIN_S = 600.0
REQUEST_S = 600.0


def spec_of(model: str) -> dict[str, Any]:
    claim = {"claimName": f"models-{model}", "path": "model"}
    return {"model": {"claim": claim}, **with_engine(ENGINES[model])}


@pytest.fixture
def models(kubelet: Kubelet) -> None:
    """Each on a claim of its own."""
    for name in ENGINES:
        folder = kubelet.claim(f"models-{name}") / "model"
        shutil.copytree(MODEL, folder)
        for file in folder.iterdir():
            file.chmod(0o644)


@dataclass(frozen=True)
class Asked:
    """A request that was answered; `number`: of its prompt."""

    number: int
    began_at: float
    token_ids: list[int]


class Asking:
    """Own a thread on which requests run all the time, `NUM_AT_ONCE` of them, and their answers."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet
        self.answered: list[Asked] = []
        self._is_enough = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="asking")
        self._running = self._thread.submit(asyncio.run, self._ask_all())

    def since(self, moment: float) -> list[Asked]:
        """What was asked after it, once there is enough; raises what has failed until now."""
        self.check()
        found = [asked for asked in self.answered if asked.began_at > moment]
        return found if len(found) >= NUM_AT_ONCE else []

    def check(self) -> None:
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
            token_ids = await self._ask(number % NUM_PROMPTS)
            self.answered.append(Asked(number % NUM_PROMPTS, began_at, token_ids))

    async def _ask(self, number: int) -> list[int]:
        """As whoever asks a Service: a router that leaves takes nothing new, the next one does."""
        while True:
            (address, *_) = await asyncio.to_thread(router_addresses, self._kubelet)
            token_ids: list[int] = []
            try:
                async with AsyncClient(address) as client:
                    async for event in client.generate(
                        token_ids=prompt_of(number),
                        max_tokens=NUM_TOKENS,
                        ignore_eos=True,
                        temperature=0.0,
                        timeout_s=REQUEST_S,
                    ):
                        if isinstance(event, Tokens):
                            assert event.index == len(token_ids), "no token twice, none missing"
                            token_ids += event.ids
                return token_ids
            except UnavailableError:
                stays = address in await asyncio.to_thread(router_addresses, self._kubelet)
                if token_ids or stays:
                    raise


def said_by(model: str) -> dict[int, list[int]]:
    """To each prompt, by one engine alone."""
    engine = snake_keys(ENGINES[model])
    config = parse_config(
        {"model": str(MODEL), "engine": engine, "pools": {"mixed": {"role": "mixed"}}}
    )
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_TOKENS)
    prompts = [np.array(prompt_of(number), np.uint32) for number in range(NUM_PROMPTS)]
    specs = [
        RequestSpec(RequestId(str(number)), prompt, len(prompt), sampling)
        for number, prompt in enumerate(prompts)
    ]
    return dict(enumerate(engine_tokens(config, specs)))


def model_of(asked: Asked, said: Mapping[str, Mapping[int, list[int]]]) -> str:
    """Whose every token it is."""
    (model,) = [name for name in said if said[name][asked.number] == asked.token_ids]
    return model


def test_streams_end_whole_and_what_is_asked_meanwhile_is_answered_by_the_next_unit(
    control_plane: ControlPlane, namespace: str, kubelet: Kubelet, models: None, tmp_path: Path
) -> None:
    said = {name: said_by(name) for name in ENGINES}
    assert all(said["first"][number] != said["second"][number] for number in range(NUM_PROMPTS))
    installed = Installed(control_plane, namespace, tmp_path)
    installed.install(
        servedModelName="both",
        router={"replicas": 1},
        pools={"mixed": {"role": "mixed"}},
        rollout={"maxSurge": 0, "maxUnavailable": 1},  # one GPU: no room for both
        **spec_of("first"),
    )
    installed.wait_available(OVER_WITHIN_S)
    states, requests = list[str](), Asking(kubelet)

    def look() -> dict[str, Any]:
        requests.check()
        assert len(units_of(control_plane, namespace)) <= 1, "never two units"
        labels = [pod["metadata"]["labels"] for pod in kubelet.pods(UNIT_LABEL)]
        assert len({each[UNIT_LABEL] for each in labels}) <= 1, "nor pods of two"
        status: dict[str, Any] = installed.read("servingcluster/default")["status"]
        state = status["rollout"]["state"]
        if states[-1:] != [state]:
            states.append(state)
        return status

    try:
        eventually(lambda: requests.since(0.0), "the first model answers", REQUEST_S)
        before, changed_at = look()["unit"], time.monotonic()
        patch = json.dumps({"spec": spec_of("second")})
        control_plane.kubectl(
            *("-n", namespace, "patch", "servingcluster/default", "--type=merge", "-p", patch)
        )

        def is_over() -> bool:
            status = look()
            serves = status["rollout"]["state"] == "Serving" and status["unit"] != before
            return serves and status["pools"] == {"mixed": "1/1"}

        eventually(is_over, "the second model serves", OVER_WITHIN_S)
        over_at = time.monotonic()
        eventually(lambda: requests.since(over_at), "it answers", REQUEST_S)
    finally:
        requests.end()
    assert states[0] == states[-1] == "Serving"
    assert "Draining" in states
    models_of = [(asked.began_at, model_of(asked, said)) for asked in requests.answered]
    waited = [began_at for began_at, model in models_of
              if changed_at < began_at < over_at and model == "second"]  # fmt: skip
    print(
        f"{len(models_of)} requests, {len(waited)} waited; {over_at - changed_at:.0f} s; {states}"
    )
    assert waited, "what was asked meanwhile was answered by the second"
    assert {model for began_at, model in models_of if began_at > over_at} == {"second"}
    assert {model for began_at, model in models_of if began_at < changed_at} == {"first"}
