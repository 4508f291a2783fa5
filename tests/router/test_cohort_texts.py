"""Two models of different tokenizers behind one router: whatever is asked of a model is in its own
ids, and whatever it answers in its own words."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.v1 import control_pb2, router_pb2
from router import router as router_module
from router import texts as texts_module
from router.cohort_texts import OWN, TextId
from router.cohorts import draw
from router.text import TextModel
from tests.router.deployment import (
    DECODE,
    PREFILL,
    PROMPT,
    Answer,
    Deployment,
    ask_for,
    byte_model,
    deployment,
    error_reason,
)
from tests.router.scripted_tokens import oracle
from tests.router.test_cohort_streams import EVEN, WEIGHTS, WORKERS, add, die, name_drawn

SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
)
SHIFTS = {"old": 0, "new": 3}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the new model's text."""
    folder = tmp_path_factory.mktemp("shifted-byte-model")
    byte_model(folder, SHIFTS["new"])
    return folder


async def tell(d: Deployment, model: Path | None, **weights: int) -> None:
    """`model`: where the new one's text is; the registry tells nothing of the old one's."""
    d.registry.pools = [
        control_pb2.PoolStatus(
            name=f"{kind}-{cohort}",
            role=role,
            desired_replicas=1,
            live_replicas=1,
            cohort=cohort,
            cohort_weight=weight,
            text=control_pb2.TextSource(model=str(model) if cohort == "new" and model else ""),
        )
        for cohort, weight in weights.items()
        for kind, role in (("p", PREFILL), ("d", DECODE))
    ]
    await d.registry.publish()
    fleets = [server.router.fleet for server in d.servers]
    await d.until(lambda: all(fleet.cohorts.weights == weights for fleet in fleets))


async def read(d: Deployment, number: int = 0) -> None:
    texts = d.servers[number].router.fleet.texts
    await d.until(lambda: texts.of("new") == TextId(1))


@asynccontextmanager
async def two_texts(
    text_model: TextModel, folder: Path, **changes: Any
) -> AsyncIterator[Deployment]:
    """A prefill and two decode workers of each model."""
    async with deployment(text_model, prefill=0, decode=0, **changes) as d:
        await tell(d, folder, **EVEN)
        for cohort in WEIGHTS:
            for name in WORKERS:
                await add(d, cohort, name)
        await d.connected(6)
        await read(d)
        yield d


def ids_of(prompt: str, cohort: str) -> list[int]:
    return [(byte + SHIFTS[cohort]) % 256 for byte in prompt.encode()]


def words_of(ids: list[int], cohort: str) -> str:
    return bytes((token_id - SHIFTS[cohort]) % 256 for token_id in ids).decode()


def alone(cohort: str, prompt: str = PROMPT, num_tokens: int = 12) -> list[int]:
    """What the model puts out that has nobody beside it."""
    return oracle(ids_of(prompt, cohort), 7 ^ WEIGHTS[cohort], num_tokens)


def assert_of(answer: Answer, cohort: str, prompt: str = PROMPT, num_tokens: int = 12) -> None:
    assert answer.routed[-1].cohort == cohort
    assert answer.ids == alone(cohort, prompt, num_tokens)[answer.from_index :]
    assert answer.text == words_of(answer.ids, cohort)


# --- streams --------------------------------------------------------------------------------------


async def test_every_stream_is_that_of_its_own_model_alone(
    text_model: TextModel, folder: Path
) -> None:
    async with two_texts(text_model, folder) as d:
        names = [f"r{number}" for number in range(30)]
        prompts = [f"story {number}: {PROMPT}" for number in range(30)]
        answers = await asyncio.gather(
            *(d.client.ask(ask_for(p, request_id=n)) for p, n in zip(prompts, names, strict=True))
        )
        for answer, name, prompt in zip(answers, names, prompts, strict=True):
            assert_of(answer, draw(name, EVEN), prompt)
        assert {answer.routed[0].cohort for answer in answers} == {"old", "new"}
        await d.check_empty()


@pytest.mark.parametrize("cohort", WEIGHTS)
async def test_a_stop_string_is_one_of_the_words_of_the_model_that_serves(
    text_model: TextModel, folder: Path, cohort: str
) -> None:
    async with two_texts(text_model, folder) as d:
        words = words_of(alone(cohort), cohort)
        request = ask_for(PROMPT, request_id=name_drawn(cohort), stop=[words[4:7]])
        answer = await d.client.ask(request)
        assert answer.text == words[:4]
        assert answer.finished is not None
        assert answer.finished.stop == words[4:7]


async def test_token_ids_go_to_the_model_that_most_requests_go_to(
    text_model: TextModel, folder: Path
) -> None:
    async with two_texts(text_model, folder) as d:
        for weights, cohort in (((60, 40), "old"), ((50, 50), "old"), ((40, 60), "new")):
            await tell(d, folder, **dict(zip(WEIGHTS, weights, strict=True)))
            told = await d.client.stub.Tokenize(router_pb2.TokenizeRequest(text=PROMPT))
            assert list(told.ids) == ids_of(PROMPT, cohort)
            for number in range(6):
                request = ask_for("", request_id=f"{cohort}-{weights[0]}-{number}")
                request.token_ids.ids.extend(told.ids)
                assert_of(await d.client.ask(request), cohort)


async def test_a_request_whose_cohort_fails_before_its_first_token_is_read_anew(
    text_model: TextModel, folder: Path
) -> None:
    async with two_texts(text_model, folder) as d:
        d.worker("new-p0").may_prefill.clear()
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT, request_id=name_drawn("new"))))
        await d.until(lambda: d.worker("new-p0").num_prefilling == 1)
        await die(d, "new-p0")
        answer = await asking
        assert [routed.cohort for routed in answer.routed] == ["new", "old"]
        assert_of(answer, "old")
        await d.check_empty()


async def test_a_request_that_the_text_of_its_draw_refuses_goes_where_it_is_not(
    text_model: TextModel, tmp_path: Path
) -> None:
    byte_model(tmp_path, SHIFTS["new"])
    (tmp_path / "config.json").write_text('{"vocab_size": 200}')
    async with two_texts(text_model, tmp_path) as d:
        request = ask_for(PROMPT, request_id=name_drawn("new"), stop_token_ids=[250])
        assert_of(await d.client.ask(request), "old")
        request = ask_for(PROMPT, request_id=name_drawn("new", 1), stop_token_ids=[1000])
        with pytest.raises(grpc.aio.AioRpcError, match="vocabulary of 200"):
            await d.client.ask(request)
        await d.check_empty()


async def test_a_request_that_the_only_text_left_refuses_is_told_so_at_once(
    text_model: TextModel, tmp_path: Path
) -> None:
    byte_model(tmp_path, SHIFTS["new"])
    (tmp_path / "config.json").write_text('{"vocab_size": 200}')
    async with two_texts(text_model, tmp_path, fleet_wait_s=15.0) as d:
        d.worker("old-p0").may_prefill.clear()
        request = ask_for(PROMPT, request_id=name_drawn("old"), stop_token_ids=[250])
        asking = asyncio.create_task(d.client.ask(request))
        await d.until(lambda: d.worker("old-p0").num_prefilling == 1)
        await tell(d, tmp_path, new=1)
        for name in WORKERS:
            await die(d, f"old-{name}")
        async with asyncio.timeout(5.0):
            with pytest.raises(grpc.aio.AioRpcError, match="outside the vocabulary") as refused:
                await asking
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await d.check_empty()


async def test_token_ids_wait_for_their_own_model_when_it_has_left(
    text_model: TextModel, folder: Path
) -> None:
    async with two_texts(text_model, folder, fleet_wait_s=0.2) as d:
        for name in WORKERS:
            await die(d, f"old-{name}")
        request = ask_for("")
        request.token_ids.ids.extend(ids_of(PROMPT, "old"))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await d.client.ask(request)
        assert error_reason(refused.value) == "UNAVAILABLE"
        assert_of(await d.client.ask(ask_for(PROMPT)), "new")


@pytest.mark.parametrize("keeps", [True, False], ids=["attached", "run again"])
async def test_another_router_goes_on_in_the_text_of_the_tokens(
    text_model: TextModel, folder: Path, keeps: bool
) -> None:
    async with two_texts(text_model, folder) as d:
        second = await d.add_router()
        await d.connected(6, d.servers[1].router)
        await read(d, 1)
        request = ask_for(PROMPT, 40, request_id=name_drawn("new"))
        seen = await d.client.ask(request, until=lambda answer: len(answer.ids) >= 3)
        await d.servers.pop(0).stop(0.0)
        await tell(d, folder, old=100, new=0)
        if not keeps:
            await die(d, seen.routed[0].decode_worker)
            request.cohort = seen.routed[0].cohort
        request.resume_from_index = len(seen.ids)
        assert_of(await second.ask(request), "new", num_tokens=40)


async def test_a_stream_in_line_is_read_anew_once_it_is_known_which_text_its_cohort_has(
    text_model: TextModel, folder: Path
) -> None:
    """The next router starts with a registry that has yet to be told of its pools and workers."""
    async with two_texts(text_model, folder, fleet_wait_s=10.0) as d:
        request = ask_for(PROMPT, 40, request_id=name_drawn("new"))
        seen = await d.client.ask(request, until=lambda answer: len(answer.ids) >= 3)
        await d.servers.pop(0).stop(0.0)
        workers = [w for w in d.registry.workers if w.worker_id != seen.routed[0].decode_worker]
        d.registry.workers, d.registry.pools = [], []
        await d.registry.publish()
        second = await d.add_router()
        request.resume_from_index, request.cohort = len(seen.ids), "new"
        request.model_fingerprints[:] = seen.routed[0].model_fingerprints
        asking = asyncio.create_task(second.ask(request))
        await d.until(lambda: len(d.router.admission) == 1)
        d.registry.workers = workers
        await tell(d, folder, **EVEN)
        assert_of(await asking, "new", num_tokens=40)


async def test_a_registry_that_is_told_of_its_pools_anew_takes_no_cohort_s_text_away(
    text_model: TextModel, folder: Path
) -> None:
    async with two_texts(text_model, folder) as d:
        await tell(d, folder, old=1)
        for name in WORKERS:
            await die(d, f"old-{name}")
        assert_of(await d.client.ask(ask_for(PROMPT)), "new")


async def test_what_cannot_be_read_keeps_a_router_from_its_other_requests_for_so_long_only(
    text_model: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_module, "READ_WITHIN_S", 0.2)
    async with deployment(text_model, prefill=0, decode=0) as d:
        await tell(d, tmp_path / "nothing", old=99, new=1)
        client = await d.add_router()
        watching = health_pb2_grpc.HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await anext(aiter(watching))).status == NOT_SERVING
        assert (await anext(aiter(watching))).status == SERVING
        assert d.servers[1].router.fleet.texts.unread == ["new"]
        watching.cancel()


async def test_a_router_is_not_ready_before_it_has_read_what_requests_go_to(
    text_model: TextModel,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(texts_module, "AGAIN_S", 0.0)
    model = tmp_path / "model"
    async with deployment(text_model, prefill=0, decode=0) as d:
        await tell(d, model, old=1, new=99)
        client = await d.add_router()
        watching = health_pb2_grpc.HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest())
        second = d.servers[1].router
        await d.until(lambda: second.fleet.texts.unread == ["new"])
        assert (await anext(aiter(watching))).status == NOT_SERVING
        shutil.copytree(folder, model)
        assert (await anext(aiter(watching))).status == SERVING
        await tell(d, tmp_path / "nothing", **EVEN)
        await d.until(lambda: second.fleet.texts.unread == ["new"])
        health = health_pb2_grpc.HealthStub(client.channel)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == SERVING, "other routers may lack it, too"
        watching.cancel()


async def test_a_stream_keeps_its_text_while_its_cohort_has_gone(
    text_model: TextModel, folder: Path
) -> None:
    async with two_texts(text_model, folder, fleet_wait_s=10.0) as d:
        for name in ("d0", "d1"):
            d.worker(f"new-{name}").may_decode.clear()
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT, request_id=name_drawn("new"))))
        await d.until(lambda: any(run.log.ids for run in d.router._runs.values()))
        await tell(d, folder, old=1)
        for name in WORKERS:
            await die(d, f"new-{name}")
        await d.until(lambda: d.router.fleet.texts.is_only(OWN))
        await tell(d, folder, **EVEN)
        for name in WORKERS:
            await add(d, "new", name)
        assert_of(await asking, "new")


# --- what is not read -----------------------------------------------------------------------------


async def test_a_cohort_whose_text_cannot_be_read_gets_nothing_until_it_can(
    text_model: TextModel,
    folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(texts_module, "AGAIN_S", 0.0)
    model = tmp_path / "model"
    async with deployment(text_model, prefill=0, decode=0) as d:
        await tell(d, model, old=1, new=99)
        for cohort in WEIGHTS:
            for name in WORKERS:
                await add(d, cohort, name)
        await d.connected(6)
        for number in range(6):
            assert_of(await d.client.ask(ask_for(PROMPT, request_id=f"r{number}")), "old")
        assert list(d.router._report().unread_cohorts) == ["new"]
        await d.until(lambda: bool(caplog.records))
        (told,) = [record for record in caplog.records if record.levelname == "ERROR"]
        assert str(model) in told.getMessage()
        shutil.copytree(folder, model)
        await read(d)
        assert not d.router._report().unread_cohorts
        answers = [await d.client.ask(ask_for(PROMPT, request_id=f"s{n}")) for n in range(6)]
        assert {answer.routed[0].cohort for answer in answers} == {"new"}
        for answer in answers:
            assert_of(answer, "new")


async def test_a_stream_of_a_cohort_whose_text_is_not_read_is_for_another_router(
    text_model: TextModel, folder: Path, tmp_path: Path
) -> None:
    async with two_texts(text_model, folder, resume_window_s=30.0) as d:
        request = ask_for(PROMPT, 40, request_id=name_drawn("new"))
        seen = await d.client.ask(request, until=lambda answer: len(answer.ids) >= 3)
        await tell(d, tmp_path / "nothing", **EVEN)
        second = await d.add_router()
        await d.connected(6, d.servers[1].router)
        request.resume_from_index = len(seen.ids)
        for cohort in (None, "new"):
            if cohort is not None:
                request.cohort = cohort
            with pytest.raises(grpc.aio.AioRpcError, match="has not read the text") as refused:
                await second.ask(request)
            assert error_reason(refused.value) == "UNAVAILABLE"
        await tell(d, folder, **EVEN)
        await read(d)
        assert_of(await d.client.ask(request), "new", num_tokens=40)
