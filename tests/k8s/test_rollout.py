"""Another unit takes over by steps while 50 streams run; one that is worse goes back by itself."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from baton.client import AsyncClient
from baton.client.events import Routed, Tokens
from baton.errors import BatonError
from baton.v1 import common_pb2, router_pb2, router_pb2_grpc
from deploy.controller.manifests.common import POOL_LABEL, UNIT_LABEL
from deploy.controller.manifests.pods import WORKER_CONTAINER
from tests.engine import checkpoints
from tests.engine.families import VOCAB
from tests.k8s.installed import DECODE_STEP_S, Installed, on_pods, router_address
from tests.k8s.kubelet.kubelet import Kubelet
from tests.k8s.kubelet.machine import image_environment
from tests.k8s.kubelet.objects import name_of
from tests.k8s.operating import eventually
from tests.k8s.streaming import asking, said_alone, streaming, tokens_of, wait_nothing_held

pytestmark = on_pods(1500, "crds", "kuberay")

NUM_AT_ONCE = 50
NUM_PROMPTS = 10
NUM_TOKENS = 120
OVER_WITHIN_S = 900.0
REAL = {"device": "cpu", "dtype": "float32", "maxNumSeqs": 64, "numBlocks": 2048}
NAME = "both"


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
    return " ".join(f"w{(7 * number + index * index) % VOCAB}" for index in range(24))


@dataclass(frozen=True)
class Answer:
    ids: list[int]
    text: str


def said_by(folder: Path) -> list[Answer]:
    """To each prompt, by one engine alone."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode(text_of(number)).ids for number in range(NUM_PROMPTS)]
    found = said_alone(prompts, NUM_TOKENS, REAL, folder)
    return [Answer(ids, tokenizer.decode(ids)) for ids in found]


async def answered(address: str, number: int) -> tuple[str, Answer]:
    """The unit that answered, and its answer."""
    unit, ids, text = "", list[int](), ""
    async with AsyncClient(address) as client:
        async for event in client.generate(
            text_of(number), max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0
        ):
            if isinstance(event, Routed):
                assert unit in ("", event.unit), "a stream stays in its unit"
                unit = event.unit
            if isinstance(event, Tokens):
                assert event.index == len(ids), "no token twice, none missing"
                ids, text = ids + list(event.ids), text + event.text
    return unit.partition("/")[0], Answer(ids, text)


async def cut_off_and_resumed(address: str, number: int) -> tuple[str, list[int]]:
    """A client that loses its connection after a few tokens, and comes back with its unit and the
    number of tokens that it got."""
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
    installed: Installed, kubelet: Kubelet
) -> None:
    said = {}
    for seed, (name, family) in enumerate({"first": "llama", "second": "qwen3"}.items()):
        folder = kubelet.claim(f"models-{name}") / "model"
        save_model(folder, family, seed)
        for file in folder.iterdir():
            file.chmod(0o644)
        said[name] = said_by(folder)
    assert all(a.ids != b.ids for a, b in zip(said["first"], said["second"], strict=True))
    installed.install(
        servedModelName=NAME,
        model={"claim": {"claimName": "models-first", "path": "model"}},
        engine=REAL,
        router={"replicas": 1},
        advanced={"router": {"placement": {"localPrefill": "never"}}},
        rollout={"interval": "20s"},
    )
    installed.wait_available(OVER_WITHIN_S)
    before, address = installed.rollout()["unit"], router_address(kubelet)
    shares, models_of = set[str](), {before: "first"}
    resumed, ended = Counter[str](), Counter[str]()
    units: list[str] = []

    async def ask(number: int) -> None:
        unit, answer = await answered(address, number % NUM_PROMPTS)
        assert answer == said[models_of.get(unit, "second")][number % NUM_PROMPTS]
        units.append(unit)

    traffic = asking(NUM_AT_ONCE, ask)
    try:
        eventually(lambda: units, "the first model answers", 120.0)
        installed.change(model={"claim": {"claimName": "models-second", "path": "model"}})

        def is_over() -> bool:
            traffic.check()
            seen = installed.rollout()
            for code, state in (seen.get("units") or {}).items():
                models_of.setdefault(code, "second")
                if models_of[code] == "second":
                    shares.add(state.partition(" ")[0])
            if seen["state"] == "Shifting" and "50%" in shares:
                number = len(resumed) % NUM_PROMPTS
                unit, ids = asyncio.run(cut_off_and_resumed(address, number))
                assert ids == said[models_of[unit]][number].ids
                resumed[models_of[unit]] += 1
                ended[models_of[asyncio.run(aborted(address, number))]] += 1
            return bool(seen["state"] == "Serving" and seen["unit"] != before)

        eventually(is_over, "the second model serves alone", OVER_WITHIN_S)
        over_at = len(units) + NUM_AT_ONCE
        eventually(lambda: len(units) > over_at, "it answers", 120.0)
    finally:
        traffic.end()
    assert {"1%", "10%", "50%", "100%"} <= shares, shares
    by_model = Counter(models_of[unit] for unit in units)
    print(f"{by_model} answers, resumed {resumed}, aborted {ended}, shares {sorted(shares)}")
    assert resumed.keys() == ended.keys() == {"first", "second"}
    assert {models_of[unit] for unit in units[over_at:]} == {"second"}
    wait_nothing_held(kubelet)


# --- the same model -------------------------------------------------------------------------------


@pytest.mark.parametrize(("surge", "unavailable"), [(1, 0), (0, 1)])
def test_another_image_of_the_workers_takes_over_worker_by_worker_and_loses_no_stream(
    installed: Installed, kubelet: Kubelet, surge: int, unavailable: int
) -> None:
    pools = {
        role: {"role": role, "initialReplicas": 2, "maxReplicas": 4}
        for role in ("prefill", "decode")
    }
    installed.serve(pools, rollout={"maxSurge": surge, "maxUnavailable": unavailable})
    before, least = installed.rollout()["unit"], dict.fromkeys(pools, 2)
    with streaming(kubelet, 150) as streams:
        installed.change(images={"worker": "baton-worker:2"})

        def is_over() -> bool:
            for pool in pools:
                ready = installed.read(f"wp/{pool}")["status"].get("readyReplicas", 0)
                least[pool] = min(least[pool], ready)
            seen = installed.rollout()
            return bool(seen["state"] == "Serving" and seen["unit"] != before)

        streams.wait(is_over, "the other unit serves alone", OVER_WITHIN_S)
        for pool in pools:
            installed.wait_whole(pool, 2)
        streams.wait_round()
    assert all(ready >= 2 - unavailable for ready in least.values()), least
    print(f"surge {surge}, unavailable {unavailable}: least live {least}")


# --- back by itself -------------------------------------------------------------------------------

READY_WITHIN = {"never ready": "60s", "fails": "10m", "slow": "10m"}
_FAILS = """
import importlib.abc, importlib.machinery, os, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "prefill_worker.service":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            whole = module.PrefillService._prefill
            async def prefill(service, request, context):
                is_fifth = int.from_bytes(request.spec.token_ids[:4], "little") % 5 == 0
                if is_fifth and os.path.exists("/faults/begun"):
                    raise RuntimeError("this prompt fails")
                async for response in whole(service, request, context):
                    yield response
            module.PrefillService._prefill = prefill
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def failing(kubelet: Kubelet) -> dict[str, Any]:
    """Every fifth prompt fails once the claim has a file `begun`: the workers' interpreters load a
    module from there."""
    folder = kubelet.claim("faults")
    (folder / "sitecustomize.py").write_text(_FAILS)
    (folder / "sitecustomize.py").chmod(0o644)
    path = f"/faults:{image_environment()['PYTHONPATH']}"
    container = {
        "name": WORKER_CONTAINER,
        "env": [{"name": "PYTHONPATH", "value": path}],
        "volumeMounts": [{"name": "faults", "mountPath": "/faults", "readOnly": True}],
    }
    volume = {"name": "faults", "persistentVolumeClaim": {"claimName": "faults"}}
    template = {"spec": {"containers": [container], "volumes": [volume]}}
    return {"pools": {"prefill": {"podTemplate": template}}}


@pytest.mark.parametrize("fault", ["never ready", "fails", "slow"])
def test_a_worse_unit_goes_back_by_itself(
    installed: Installed, kubelet: Kubelet, fault: str
) -> None:
    faults: dict[str, dict[str, Any]] = {
        "never ready": {"model": {"name": "/no/such/model"}},
        "fails": failing(kubelet),
        "slow": {"advanced": {"engine": {"fake": {"decodeStepSeconds": 3 * DECODE_STEP_S}}}},
    }
    (kubelet.claim("faults") / "begun").touch()
    rollout = {"interval": "120s", "steps": [50, 100], "readyTimeout": READY_WITHIN[fault]}
    installed.serve(servedModelName=NAME, rollout=rollout)
    before, failed = installed.rollout()["unit"], list[BatonError]()
    address = router_address(kubelet)

    async def ask(number: int) -> None:
        try:
            async with AsyncClient(address) as client:
                assert len(await tokens_of(client, [5 + number % 200] * 20, 30)) == 30
        except BatonError as error:
            failed.append(error)

    traffic = asking(8, ask)
    try:
        began_at = time.monotonic()
        installed.change(**faults[fault])

        def is_back() -> bool:
            traffic.check()
            seen = installed.rollout()
            return bool(seen["state"] == "Reverted" and seen["unit"] == before)

        eventually(is_back, "the former unit has all requests again", 600.0)
        print(f"{fault}: back after {time.monotonic() - began_at:.0f} s, {len(failed)} failed")
        degraded = installed.own_condition("Degraded")
        assert (degraded["status"], degraded["reason"]) == ("True", "RolloutFailed")
        print(degraded["message"])
        assert len(installed.units()) == 1
        num_failed = len(failed)
    finally:
        traffic.end()
    assert len(failed) - num_failed <= 8, "those that were under way"
    assert fault == "fails" or not failed
    expected = {"never ready": "became ready", "fails": "of its requests fail", "slow": "gaps"}
    assert expected[fault] in degraded["message"]


# --- no way back ----------------------------------------------------------------------------------


def test_a_unit_that_fails_once_the_former_has_begun_to_go_keeps_the_requests(
    installed: Installed, kubelet: Kubelet
) -> None:
    """The former's workers have ended, and something else holds their pods."""
    installed.serve(servedModelName=NAME, rollout={"maxFailurePercent": 0})
    before, address = installed.rollout()["unit"], router_address(kubelet)
    ended, failed = Counter[bool](), Counter[bool]()  # by whether they are to fail

    async def ask(number: int) -> None:
        try:
            async with AsyncClient(address) as client:
                await tokens_of(client, [5 + number % 200] * 20, 30)
        except BatonError:
            failed[number % 5 == 0] += 1
        ended[number % 5 == 0] += 1

    def hold(*names: str) -> None:
        patch = json.dumps({"metadata": {"finalizers": names}})
        for pod in pods:
            installed.kubectl("patch", "pod", pod, "--type=merge", "-p", patch)

    pods = {name_of(pod) for pod in kubelet.pods(f"{POOL_LABEL},{UNIT_LABEL}={before}")}
    hold("baton.dev/test")
    traffic = asking(8, ask)
    try:
        installed.change(**failing(kubelet))

        def has_gone() -> bool:
            traffic.check()
            left = [pod["metadata"] for pod in kubelet.pods(f"{UNIT_LABEL}={before}")]
            return {each["name"] for each in left if "deletionTimestamp" in each} == pods

        eventually(has_gone, "the former unit's workers go", OVER_WITHIN_S)
        assert not failed
        (kubelet.claim("faults") / "begun").touch()
        num_ended = ended[False]

        def has_failed() -> bool:
            assert installed.rollout()["state"] == "Retiring"
            return failed[True] >= 20 and ended[False] > num_ended + 100

        eventually(has_failed, "the coming unit fails, and answers the others", 120.0)
    finally:
        hold()
        traffic.end()
    assert not failed[False], failed
    print(f"{ended} ended, {failed} failed")
