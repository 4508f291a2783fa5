"""Another model takes over on one worker, without room for two, while requests come all the time:
what runs ends whole with the first, what is asked meanwhile is answered by the second."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from baton.client import AsyncClient
from baton.errors import UnavailableError
from deploy.controller.manifests.common import UNIT_LABEL
from tests.k8s.installed import MODEL, Installed, on_pods, router_addresses, with_engine
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.operating import eventually
from tests.k8s.streaming import asking, prompt_of, said_alone, tokens_of

pytestmark = on_pods(1500, "crds", "kuberay")

ENGINES: dict[str, dict[str, Any]] = {
    name: {"backend": "fake", "fake": {"decodeStepSeconds": 0.05} | more, "maxNumSeqs": 64}
    for name, more in {"first": {}, "second": {"window": 8}}.items()
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


class Answers:
    """To requests that run all the time."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet
        self.all: list[Asked] = []

    def since(self, moment: float) -> list[Asked]:
        """What was asked after it, once there is enough."""
        found = [asked for asked in self.all if asked.began_at > moment]
        return found if len(found) >= NUM_AT_ONCE else []

    async def ask(self, number: int) -> None:
        began_at, number = time.monotonic(), number % NUM_PROMPTS
        self.all.append(Asked(number, began_at, await self._ask(number)))

    async def _ask(self, number: int) -> list[int]:
        """As a client of a Service: a router that leaves takes nothing new, the next one does."""
        while True:
            (address, *_) = await asyncio.to_thread(router_addresses, self._kubelet)
            try:
                async with AsyncClient(address) as client:
                    prompt = prompt_of(number)
                    return await tokens_of(client, prompt, NUM_TOKENS, timeout_s=REQUEST_S)
            except UnavailableError:
                if address in await asyncio.to_thread(router_addresses, self._kubelet):
                    raise


def model_of(asked: Asked, said: Mapping[str, list[list[int]]]) -> str:
    """Whose every token it is."""
    (model,) = [name for name in said if said[name][asked.number] == asked.token_ids]
    return model


def test_streams_end_whole_and_what_is_asked_meanwhile_is_answered_by_the_next_unit(
    installed: Installed, kubelet: Kubelet, models: None
) -> None:
    prompts = [prompt_of(number) for number in range(NUM_PROMPTS)]
    said = {name: said_alone(prompts, NUM_TOKENS, engine) for name, engine in ENGINES.items()}
    assert all(one != other for one, other in zip(*said.values(), strict=True))
    installed.install(
        servedModelName="both",
        router={"replicas": 1},
        pools={"prefill": None, "decode": None, "mixed": {"role": "mixed"}},
        rollout={"maxSurge": 0, "maxUnavailable": 1},  # one GPU: no room for both
        **spec_of("first"),
    )
    installed.wait_available(OVER_WITHIN_S)
    states, answers = list[str](), Answers(kubelet)
    requests = asking(NUM_AT_ONCE, answers.ask)

    def look() -> dict[str, Any]:
        requests.check()
        assert len(installed.units()) <= 1, "never two units"
        labels = [pod["metadata"]["labels"] for pod in kubelet.pods(UNIT_LABEL)]
        assert len({each[UNIT_LABEL] for each in labels}) <= 1, "nor pods of two"
        rollout = installed.rollout()
        if states[-1:] != [rollout["state"]]:
            states.append(rollout["state"])
        return rollout

    try:
        eventually(lambda: answers.since(0.0), "the first model answers", REQUEST_S)
        before, changed_at = look()["unit"], time.monotonic()
        installed.change(**spec_of("second"))

        def is_over() -> bool:
            rollout = look()
            serves = rollout["state"] == "Serving" and rollout["unit"] != before
            return serves and installed.is_whole("mixed", 1)

        eventually(is_over, "the second model serves", OVER_WITHIN_S)
        over_at = time.monotonic()
        eventually(lambda: answers.since(over_at), "it answers", REQUEST_S)
    finally:
        requests.end()
    assert states[0] == states[-1] == "Serving"
    assert "Draining" in states
    models_of = [(asked.began_at, model_of(asked, said)) for asked in answers.all]
    waited = [began_at for began_at, model in models_of
              if changed_at < began_at < over_at and model == "second"]  # fmt: skip
    took_s = over_at - changed_at
    print(f"{len(models_of)} requests, {len(waited)} waited; {took_s:.0f} s; {states}")
    assert waited, "what was asked meanwhile was answered by the second"
    assert {model for began_at, model in models_of if began_at > over_at} == {"second"}
    assert {model for began_at, model in models_of if began_at < changed_at} == {"first"}
