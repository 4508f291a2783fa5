"""A change of weights, on real engines and random checkpoints: requests go over by shares, and back
by themselves where the new model is too slow. Every stream is one model's, to its last token."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from baton.client import AsyncClient
from baton.control_client import ControlClient
from baton.errors import UnavailableError
from deploy.controller.manifests.common import POOL_LABEL
from deploy.controller.manifests.pods import REVISION_LABEL
from deploy.controller.manifests.ray_cluster import revision_in
from tests.engine import checkpoints
from tests.engine.checkpoints import VOCAB
from tests.engine.driving import random_prompt
from tests.k8s.addresses import control_address, router_addresses
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.operating import condition, eventually
from tests.k8s.test_serving import Installed
from tests.path.oracles import Overrides, greedy_tokens, oracle_model
from tests.path.whole_path import Answer, ask

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.full,
    pytest.mark.timeout(1500),
    pytest.mark.usefixtures("crds", "kuberay"),
]

MODELS: dict[str, tuple[str, Overrides]] = {
    "first": ("llama", ()),
    "second": ("qwen2", ()),
    "slow": ("llama", (("intermediate_size", 1 << 17),)),
}
"""By the names of their folders. `slow` reads 300 MB of weights for each token."""
ENGINE = {
    "dtype": "float32",
    "numThreads": 1,
    "numBlocks": 512,
    "maxNumSeqs": 16,
    "maxNumBatchedTokens": 64,
}
GOOD_CHANGE = {"step": "5s", "maxItlFactor": 100}
"""By the weights that a cluster has which names no others. Of two families one may be slower."""
SLOW_CHANGE = {"weights": [50, 100], "step": "5s", "maxItlFactor": 3}
"""Of one request in a hundred there would be too few to tell within a test's time."""
NUM_AT_ONCE = 3
NUM_PROMPTS = 6
NUM_TOKENS = 48
OVER_WITHIN_S = 400.0
REQUEST_S = 120.0
LAG_S = 1.0


def model_in(folder: str) -> dict[str, Any]:
    return {"claim": {"claimName": claim_of(folder), "path": "model"}}


def claim_of(folder: str) -> str:
    return f"models-{folder}"


def prompt_of(number: int) -> list[int]:
    return random_prompt(40 + 17 * number, VOCAB, seed=number)


@pytest.fixture
def models(kubelet: Kubelet) -> None:
    """Checkpoints, each on a claim of its own, all in folders of one name."""
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    for name, (family, overrides) in MODELS.items():
        folder = kubelet.claim(claim_of(name)) / "model"
        oracle_model(family, overrides).save_pretrained(folder)
        checkpoints.save_tokenizer(folder)
        for file in folder.iterdir():
            file.chmod(0o644)


@dataclass(frozen=True)
class Asked:
    """A request that was answered."""

    number: int
    """Of its prompt."""
    began_at: float
    answer: Answer

    @property
    def cohort(self) -> str:
        return self.answer.routed[-1].cohort


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
            try:
                async with AsyncClient(address) as client:
                    return await self._answer(client, prompt, streams)
            except UnavailableError:
                if streams.is_set() or address in await self._routers():
                    raise

    async def _answer(
        self, client: AsyncClient, prompt: list[int], streams: asyncio.Event
    ) -> Answer:
        """`streams` is set once tokens come."""
        options: dict[str, Any] = {"max_tokens": NUM_TOKENS, "timeout_s": REQUEST_S}
        return await ask(client, prompt, tries=None, streams=streams, **options)

    async def _routers(self) -> list[str]:
        return await asyncio.to_thread(router_addresses, self._kubelet)


@contextlib.contextmanager
def asking(running: Asking) -> Iterator[Asking]:
    """Through the whole block; no request has failed in it."""
    try:
        yield running
    finally:
        running.end()


class Changing:
    """A cluster whose model is changed under requests."""

    def __init__(
        self, installed: Installed, control_plane: ControlPlane, kubelet: Kubelet, asking: Asking
    ) -> None:
        self._installed, self._control_plane = installed, control_plane
        self._kubelet, self._asking = kubelet, asking
        self.models: dict[str, str] = {}
        """By cohort."""
        self._cohorts: dict[str, str] = {}
        """By revision, of all that there ever were."""
        self.weights: list[tuple[float, int]] = []
        """Of the newest cohort, each once, and when it was told."""

    def status(self) -> dict[str, Any]:
        """Of the ServingCluster; raises what became of the requests."""
        self._asking.check()
        found: dict[str, Any] = self._installed.read("servingcluster/default")
        status: dict[str, Any] = found["status"]
        if status["observedGeneration"] == found["metadata"]["generation"]:
            claim = found["spec"]["model"]["claim"]["claimName"]
            self.models.setdefault(status["revision"], claim.removeprefix(claim_of("")))
        weight = status["cohort"]["weight"]
        if not self.weights or self.weights[-1][1] != weight:
            self.weights.append((time.monotonic(), weight))
        return status

    def change_to(self, model: str, **more: Any) -> None:
        patch = json.dumps({"spec": {"model": model_in(model), **more}})
        self._control_plane.kubectl(
            *("-n", self._installed.namespace, "patch", "servingcluster/default"),
            *("--type=merge", "-p", patch),
        )
        self.weights.clear()
        eventually(lambda: self.status() and model in self.models.values(), "it is seen")

    def serves(self, phase: str, model: str) -> bool:
        """Whether the rollout is over, and all that runs is of this model."""
        cohort = self.status()["cohort"]
        assert phase == "Returned" or not cohort.get("isFault"), cohort
        is_over = cohort["phase"] == phase and self.models[cohort["serving"]] == model
        return is_over and self.running() == {model}

    def running(self) -> set[str]:
        """Models of which there are pods, or workers of any state."""
        found = self._installed.read("rayclusters.ray.io/default")["spec"]["workerGroupSpecs"]
        self._cohorts |= {group["groupName"]: revision_in(group).cohort for group in found}
        pods = [pod["metadata"]["labels"] for pod in self._kubelet.pods(POOL_LABEL)]
        revisions = {labels[REVISION_LABEL] for labels in pods if REVISION_LABEL in labels}
        with ControlClient(control_address(self._kubelet)) as client:
            revisions |= {worker.info.pool for worker in client.fleet().workers}
        return {self.models[self._cohorts[name]] for name in revisions}

    def answers_now(self) -> set[str]:
        """Models that answer what is asked from now on."""
        now, wanted = time.monotonic(), 4 * NUM_AT_ONCE

        def answered() -> list[Asked]:
            self._asking.check()
            found = [asked for asked in self._asking.answered if asked.began_at > now]
            return found if len(found) >= wanted else []

        return {self.models[each.cohort] for each in eventually(answered, "answers", REQUEST_S)}

    def course(self) -> list[int]:
        return [weight for _, weight in self.weights]

    def check_shares(self, model: str) -> None:
        """Of requests that began while a weight was told so many went to the model as a draw by
        that weight gives: further away than by four deviations none is. A weight holds a moment
        before it is told and is told a moment after it holds."""
        for (since, weight), (until, _) in itertools.pairwise(self.weights):
            known = since + LAG_S, until - LAG_S
            began = [each for each in self._asking.answered if known[0] < each.began_at < known[1]]
            num = sum(self.models[asked.cohort] == model for asked in began)
            share, total = weight / 100, len(began)
            print(f"{weight}% to {model}: {num} of {total} requests")
            assert abs(num - share * total) <= 4 * math.sqrt(total * share * (1 - share)), weight

    def check_tokens(self) -> None:
        """Each stream is what its one model says."""
        for asked in self._asking.answered:
            family, overrides = MODELS[self.models[asked.cohort]]
            said = greedy_tokens(family, overrides, prompt_of(asked.number), NUM_TOKENS)
            assert asked.answer.ids == said, asked


def test_requests_go_over_to_another_checkpoint_by_shares_and_back_from_one_that_is_slow(
    control_plane: ControlPlane, namespace: str, kubelet: Kubelet, models: None, tmp_path: Path
) -> None:
    installed = Installed(control_plane, namespace, tmp_path)
    installed.install(
        model=model_in("first"),
        servedModelName="both",
        engine=ENGINE,
        rollout=GOOD_CHANGE,
        router={"replicas": 2, "settings": {"localPrefill": "never"}},
    )
    installed.wait_available()
    with asking(Asking(kubelet)) as requests:
        changing = Changing(installed, control_plane, kubelet, requests)
        eventually(lambda: changing.status() and changing.models, "the first one is told of")
        assert changing.answers_now() == {"first"}

        changing.change_to("second")
        eventually(lambda: changing.serves("Serving", "second"), "it is over", OVER_WITHIN_S)
        assert changing.course() == [0, 1, 10, 50, 100, 0], "the last is of none that is to come"
        changing.check_shares("second")
        assert changing.answers_now() == {"second"}

        changing.change_to("slow", rollout=SLOW_CHANGE)

        def taken_back() -> str:
            changing.status()
            told = condition(installed.read("servingcluster/default"), "Degraded")
            return str(told["message"]) if told["reason"] == "CohortTakenBack" else ""

        why = eventually(taken_back, "the slow one is taken back", OVER_WITHIN_S)
        assert "ms between its tokens" in why
        assert "maxItlFactor is 3" in why
        eventually(lambda: changing.serves("Returned", "second"), "it is gone", OVER_WITHIN_S)
        assert changing.course() == [0, 50, 0]
        told = condition(installed.read("servingcluster/default"), "Progressing")
        assert (told["status"], told["reason"]) == ("False", "CohortReturned")
        assert changing.answers_now() == {"second"}
    assert {changing.models[each.cohort] for each in requests.answered} == set(MODELS)
    changing.check_tokens()
    print(f"{len(requests.answered)} requests; {why}")
