"""Another unit takes over by steps while 50 streams run; one that is worse goes back by itself."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from baton.client import AsyncClient
from baton.client.events import Finished, Routed, Tokens
from baton.config.cluster import parse_config
from baton.errors import BatonError
from baton.v1 import common_pb2, router_pb2, router_pb2_grpc
from deploy.api.naming import snake_keys
from engine.request import RequestId, RequestSpec, SamplingParams
from tests.cluster.whole_cluster import engine_tokens
from tests.engine import checkpoints
from tests.engine.families import VOCAB
from tests.k8s.addresses import router_addresses
from tests.k8s.control_plane.plane import ControlPlane
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.operating import condition, eventually
from tests.k8s.streaming import holds_nothing_more, streaming
from tests.k8s.test_pools_change import is_whole
from tests.k8s.test_serving import DECODE_STEP_S, FAKE, MODEL, Installed, with_engine
from tests.k8s.units import units_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.full,
    pytest.mark.timeout(1500),
    pytest.mark.usefixtures("crds", "kuberay"),
]

NUM_AT_ONCE = 50
NUM_PROMPTS = 10
NUM_TOKENS = 120
OVER_WITHIN_S = 900.0
REAL = {"device": "cpu", "dtype": "float32", "maxNumSeqs": 64, "numBlocks": 2048}
NAME = "both"


def patch(installed: Installed, control_plane: ControlPlane, spec: Mapping[str, Any]) -> None:
    control_plane.kubectl(
        *("-n", installed.namespace, "patch", "servingcluster/default", "--type=merge"),
        *("-p", json.dumps({"spec": spec})),
    )


def rollout_of(installed: Installed) -> dict[str, Any]:
    status = installed.read("servingcluster/default")["status"]
    found: dict[str, Any] = status.get("rollout") or {}
    return found | {"unit": status.get("unit", "")}


# --- two models -----------------------------------------------------------------------------------


def save_model(folder: Path, family: str, seed: int) -> None:
    """A random checkpoint whose tokenizer gives each word an id of its own choosing."""
    checkpoints.oracle_model(family).save_pretrained(folder)
    ids = list(range(VOCAB))
    random.Random(seed).shuffle(ids)
    tokenizer = Tokenizer(models.WordLevel({f"w{n}": i for n, i in enumerate(ids)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def text_of(number: int) -> str:
    return " ".join(f"w{(7 * number + place * place) % VOCAB}" for place in range(24))


@dataclass(frozen=True)
class Answer:
    ids: list[int]
    text: str


def said_by(folder: Path) -> list[Answer]:
    """To each prompt, by one engine alone."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = parse_config(
        {
            "model": str(folder),
            "engine": snake_keys(REAL),
            "pools": {"mixed": {"role": "mixed"}},
        }
    )
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_TOKENS)
    specs = []
    for number in range(NUM_PROMPTS):
        prompt = np.array(tokenizer.encode(text_of(number)).ids, np.uint32)
        specs.append(RequestSpec(RequestId(str(number)), prompt, len(prompt), sampling))
    found = engine_tokens(config, specs)
    return [Answer(ids, tokenizer.decode(ids)) for ids in found]


@dataclass(frozen=True)
class Told:
    number: int
    unit: str
    answer: Answer


class Traffic:
    """Own a thread on which `NUM_AT_ONCE` streams run all the time, and what they said."""

    def __init__(self, kubelet: Kubelet) -> None:
        (self.address, *_) = router_addresses(kubelet)
        self.told: list[Told] = []
        self._is_enough = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="traffic")
        self._running = self._thread.submit(asyncio.run, self._ask_all())

    def check(self) -> None:
        """Raises what has failed until now."""
        if self._running.done():
            self._running.result()

    def end(self) -> None:
        self._is_enough.set()
        self._running.result(120.0)
        self._thread.shutdown()

    async def _ask_all(self) -> None:
        async with AsyncClient(self.address) as client, asyncio.TaskGroup() as group:
            for first in range(NUM_AT_ONCE):
                group.create_task(self._ask_on(client, first))

    async def _ask_on(self, client: AsyncClient, first: int) -> None:
        for number in itertools.count(first):
            if self._is_enough.is_set():
                return
            self.told.append(await self._ask(client, number % NUM_PROMPTS))

    async def _ask(self, client: AsyncClient, number: int) -> Told:
        unit, ids, text = "", list[int](), ""
        async for event in client.generate(
            text_of(number), max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0
        ):
            if isinstance(event, Routed):
                assert unit in ("", event.unit), "a stream stays in its unit"
                unit = event.unit
            if isinstance(event, Tokens):
                assert event.index == len(ids), "no token twice, none missing"
                ids, text = ids + list(event.ids), text + event.text
        return Told(number, unit.partition("/")[0], Answer(ids, text))


async def cut_off_and_resumed(address: str, number: int) -> tuple[str, list[int]]:
    """A client that loses its connection after a few tokens, and comes back with what it was told:
    its unit, and all that it got."""
    request = router_pb2.GenerateRequest(
        request_id=f"cut-{number}-{time.monotonic_ns()}",
        text=text_of(number),
        sampling=common_pb2.SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
    )
    ids: list[int] = []
    async with grpc.aio.insecure_channel(address) as channel:
        call = router_pb2_grpc.RouterServiceStub(channel).Generate(request)
        async for response in call:
            if response.WhichOneof("event") == "routed":
                request.unit, request.seed = response.routed.unit, response.routed.seed
            if response.WhichOneof("event") == "tokens":
                ids += response.tokens.ids
            if len(ids) > 5:
                break
        call.cancel()
    request.resume_from_index = len(ids)
    async with grpc.aio.insecure_channel(address) as channel:
        async for response in router_pb2_grpc.RouterServiceStub(channel).Generate(request):
            if response.WhichOneof("event") == "routed":
                assert response.routed.unit == request.unit
            if response.WhichOneof("event") == "tokens":
                assert response.tokens.index == len(ids), "no token twice, none missing"
                ids += response.tokens.ids
    return request.unit.partition("/")[0], ids


async def aborted(address: str, number: int) -> str:
    """The unit of a stream that an Abort without a unit has ended."""
    request_id, unit, reason = f"abort-{number}-{time.monotonic_ns()}", "", None
    async with grpc.aio.insecure_channel(address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        request = router_pb2.GenerateRequest(
            request_id=request_id,
            text=text_of(number),
            sampling=common_pb2.SamplingParams(max_tokens=1500, ignore_eos=True),
        )
        is_asked = False
        async for response in stub.Generate(request):
            event = response.WhichOneof("event")
            unit = response.routed.unit if event == "routed" else unit
            if event == "tokens" and not is_asked:
                is_asked = True
                await stub.Abort(router_pb2.AbortRequest(request_id=request_id))
            if event == "finished":
                reason = response.finished.reason
    assert reason == common_pb2.FINISH_REASON_ABORTED
    return unit.partition("/")[0]


def test_another_model_with_another_tokenizer_takes_over_by_steps(
    control_plane: ControlPlane, namespace: str, kubelet: Kubelet, tmp_path: Path
) -> None:
    claims = {}
    for seed, (name, family) in enumerate({"first": "llama", "second": "qwen3"}.items()):
        claims[name] = kubelet.claim(f"models-{name}") / "model"
        save_model(claims[name], family, seed)
        for file in claims[name].iterdir():
            file.chmod(0o644)
    said = {name: said_by(folder) for name, folder in claims.items()}
    assert all(a.ids != b.ids for a, b in zip(said["first"], said["second"], strict=True))
    installed = Installed(control_plane, namespace, tmp_path)
    installed.install(
        servedModelName=NAME,
        model={"claim": {"claimName": "models-first", "path": "model"}},
        engine=REAL,
        router={"replicas": 1},
        advanced={"router": {"localPrefill": "never"}},
        rollout={"interval": "20s"},
    )
    installed.wait_available(OVER_WITHIN_S)
    before, traffic = rollout_of(installed)["unit"], Traffic(kubelet)
    shares, models_of = set[str](), {before: "first"}
    resumed, ended = Counter[str](), Counter[str]()
    try:
        eventually(lambda: traffic.told, "the first model answers", 120.0)
        patch(
            installed,
            control_plane,
            {"model": {"claim": {"claimName": "models-second", "path": "model"}}},
        )

        def is_over() -> bool:
            traffic.check()
            seen = rollout_of(installed)
            for code, told in (seen.get("units") or {}).items():
                models_of.setdefault(code, "second")
                if models_of[code] == "second":
                    shares.add(told.partition(" ")[0])
            if seen["state"] == "Shifting" and "50%" in shares:
                number = len(resumed) % NUM_PROMPTS
                unit, ids = asyncio.run(cut_off_and_resumed(traffic.address, number))
                assert ids == said[models_of[unit]][number].ids
                resumed[models_of[unit]] += 1
                ended[models_of[asyncio.run(aborted(traffic.address, number))]] += 1
            return bool(seen["state"] == "Serving" and seen["unit"] != before)

        eventually(is_over, "the second model serves alone", OVER_WITHIN_S)
        over_at = len(traffic.told)
        eventually(lambda: len(traffic.told) > over_at + NUM_AT_ONCE, "it answers", 120.0)
    finally:
        traffic.end()
    assert {"1%", "10%", "50%", "100%"} <= shares, shares
    for told in traffic.told:
        assert told.answer == said[models_of[told.unit]][told.number]
    by_model = Counter(models_of[told.unit] for told in traffic.told)
    print(f"{by_model} answers, resumed {resumed}, aborted {ended}, shares {sorted(shares)}")
    assert resumed.keys() == ended.keys() == {"first", "second"}
    assert {models_of[told.unit] for told in traffic.told[over_at + NUM_AT_ONCE :]} == {"second"}
    eventually(lambda: holds_nothing_more(kubelet), "workers hold nothing any more", 120.0)


# --- the same model -------------------------------------------------------------------------------


@pytest.mark.parametrize(("surge", "unavailable"), [(1, 0), (0, 1)])
def test_another_image_of_the_workers_takes_over_worker_by_worker_and_loses_no_stream(
    control_plane: ControlPlane,
    namespace: str,
    kubelet: Kubelet,
    tmp_path: Path,
    surge: int,
    unavailable: int,
) -> None:
    pools = {
        role: {"role": role, "initialReplicas": 2, "maxReplicas": 4}
        for role in ("prefill", "decode")
    }
    installed = Installed(control_plane, namespace, tmp_path)
    installed.install(
        model={"name": str(MODEL)},
        **with_engine(FAKE, router={"localPrefill": "never"}),
        pools=pools,
        router={"replicas": 1},
        rollout={"maxSurge": surge, "maxUnavailable": unavailable},
    )
    installed.wait_available()
    eventually(lambda: all(is_whole(installed, p, 2) for p in pools), "all workers are live", 150)
    before, least = rollout_of(installed)["unit"], dict.fromkeys(pools, 2)
    with streaming(kubelet, 150) as streams:
        patch(installed, control_plane, {"images": {"worker": "baton-worker:2"}})

        def is_over() -> bool:
            streams.check()
            for pool in pools:
                ready = installed.read(f"wp/{pool}")["status"].get("readyReplicas", 0)
                least[pool] = min(least[pool], ready)
            seen = rollout_of(installed)
            return bool(seen["state"] == "Serving" and seen["unit"] != before)

        eventually(is_over, "the other unit serves alone", OVER_WITHIN_S)
        eventually(lambda: all(is_whole(installed, p, 2) for p in pools), "it is whole", 150)
        streams.wait_round()
    assert all(ready >= 2 - unavailable for ready in least.values()), least
    print(f"surge {surge}, unavailable {unavailable}: least live {least}")


# --- back by itself -------------------------------------------------------------------------------

READY_WITHIN = {"never ready": "60s", "fails": "10m", "slow": "10m"}
_FAILS = """
import importlib.abc, importlib.machinery, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "prefill_worker.service":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            whole, calls = module.PrefillService.Prefill, [0]
            async def prefill(service, request, context):
                calls[0] += 1
                if calls[0] % 5 == 0:
                    raise RuntimeError("every fifth fails")
                async for response in whole(service, request, context):
                    yield response
            module.PrefillService.Prefill = prefill
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def failing(kubelet: Kubelet) -> dict[str, Any]:
    """Workers whose every fifth prefill fails, by a module that their interpreters load."""
    folder = kubelet.claim("faults")
    (folder / "sitecustomize.py").write_text(_FAILS)
    (folder / "sitecustomize.py").chmod(0o644)
    return {"pools": {"prefill": {"env": [{"name": "PYTHONPATH", "value": str(folder)}]}}}


@pytest.mark.parametrize("fault", ["never ready", "fails", "slow"])
def test_a_worse_unit_goes_back_by_itself(
    control_plane: ControlPlane, namespace: str, kubelet: Kubelet, tmp_path: Path, fault: str
) -> None:
    faults: dict[str, dict[str, Any]] = {
        "never ready": {"model": {"name": "/no/such/model"}},
        "fails": failing(kubelet),
        "slow": {"advanced": {"engine": {"fake": {"decodeStepSeconds": 3 * DECODE_STEP_S}}}},
    }
    installed = Installed(control_plane, namespace, tmp_path)
    installed.install(
        servedModelName=NAME,
        model={"name": str(MODEL)},
        **with_engine(FAKE, router={"localPrefill": "never"}),
        pools={"prefill": {"role": "prefill"}, "decode": {"role": "decode"}},
        router={"replicas": 1},
        rollout={"interval": "120s", "steps": [50, 100], "readyTimeout": READY_WITHIN[fault]},
    )
    installed.wait_available()
    before, failed = rollout_of(installed)["unit"], list[BatonError]()
    (address, *_) = router_addresses(kubelet)
    is_enough = threading.Event()

    async def ask_on(client: AsyncClient, number: int) -> None:
        while not is_enough.is_set():
            try:
                async for event in client.generate(
                    token_ids=[5 + number] * 20, max_tokens=30, ignore_eos=True
                ):
                    assert not isinstance(event, Finished) or event.usage.num_output_tokens == 30
            except BatonError as error:
                failed.append(error)

    async def ask() -> None:
        async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(ask_on(client, number))

    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(asyncio.run, ask())
        try:
            began_at = time.monotonic()
            patch(installed, control_plane, faults[fault])

            def is_back() -> bool:
                assert not asking.done()
                seen = rollout_of(installed)
                return bool(seen["state"] == "Reverted" and seen["unit"] == before)

            eventually(is_back, "the former unit has all requests again", 600.0)
            print(f"{fault}: back after {time.monotonic() - began_at:.0f} s, {len(failed)} failed")
            degraded = condition(installed.read("servingcluster/default"), "Degraded")
            assert (degraded["status"], degraded["reason"]) == ("True", "RolloutFailed")
            print(degraded["message"])
            assert len(units_of(control_plane, namespace)) == 1
            num_failed = len(failed)
        finally:
            is_enough.set()
            asking.result(120.0)
    assert len(failed) - num_failed <= 8, "those that were under way"
    assert fault == "fails" or not failed
    expected = {"never ready": "became ready", "fails": "of its requests fail", "slow": "gaps"}
    assert expected[fault] in degraded["message"]
