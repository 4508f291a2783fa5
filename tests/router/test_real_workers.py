"""The router over real workers (fake engine, in-memory transfer) and a connection that breaks."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import grpc.aio
import numpy as np
import pytest

from baton.config.engine import FakeEngineConfig
from baton.config.router import RouterConfig
from baton.v1 import common_pb2, control_pb2, router_pb2, worker_pb2, worker_pb2_grpc
from cluster.pools.role_plan import Role
from cluster.worker.worker import Worker
from engine.wire import read_spec
from router.door import Door
from router.router import Router
from router.server import RouterServer
from router.text import TextModel
from tests.cluster.conftest import ENGINE, engine_tokens, nothing_held, running_worker
from tests.router.deployment import QUICK, Answer, Client, Registry, reading
from tests.router.proxy import Proxy

SMALL_VOCABULARY = dataclasses.replace(
    ENGINE, fake=FakeEngineConfig(window=20, vocab_size=257, decode_step_s=0.004)
)
NUM_TOKENS = 60


@dataclass
class Listed:
    """A worker as the registry tells of it; `address` may be a proxy's."""

    worker: Worker
    address: str

    def info(self) -> control_pb2.FleetWorker:
        info = control_pb2.WorkerInfo()
        info.CopyFrom(self.worker.info())
        info.address = self.address
        return control_pb2.FleetWorker(info=info, state=control_pb2.WORKER_STATE_LIVE)


def request_of(number: int) -> router_pb2.GenerateRequest:
    prompt = [(number * 31 + position) % 256 for position in range(20 + number)]
    sampling = common_pb2.SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, top_p=1.0
    )
    ids = router_pb2.TokenIds(ids=prompt)
    return router_pb2.GenerateRequest(token_ids=ids, sampling=sampling, seed=7)


async def num_decoded(worker: Client) -> int:
    """Tokens the worker has sampled since its start, those of prefills for others apart."""
    stub = worker_pb2_grpc.WorkerServiceStub(worker.channel)
    response = await stub.CheckIntegrity(worker_pb2.CheckIntegrityRequest())
    assert not response.problems
    return response.num_later_tokens


@asynccontextmanager
async def router_over(
    text_model: TextModel, *workers: Listed, config: RouterConfig = QUICK
) -> AsyncIterator[tuple[Router, Client]]:
    registry = Registry()
    registry.workers = list(workers)  # type: ignore[arg-type]
    await registry.start()
    read = reading(text_model, registry)
    door = Door(config, registry.address, "fake", read=read, rng=random.Random(0))
    server = RouterServer(door, config, "127.0.0.1:0")
    await server.start()
    router = await door.main_router()
    client = Client(server.address)
    try:
        await until(lambda: sum(entry.usable for entry in router.fleet) == len(workers))
        yield router, client
    finally:
        await client.channel.close()
        await server.stop(0.0)
        await registry.stop()


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not happened():  # noqa: ASYNC110  whatever it is, it has no event
            await asyncio.sleep(0.005)


async def test_a_connection_cut_again_and_again_repeats_no_step_of_a_real_worker(
    text_model: TextModel,
) -> None:
    async with (
        running_worker("p0", Role.PREFILL, SMALL_VOCABULARY) as prefill,
        running_worker("d0", Role.DECODE, SMALL_VOCABULARY) as decode,
    ):
        proxy = await Proxy.to(decode.address)
        listed = Listed(prefill, prefill.address), Listed(decode, proxy.address)
        worker = Client(decode.address)
        async with router_over(text_model, *listed) as (router, client):
            asking = [asyncio.create_task(client.ask(request_of(n))) for n in range(6)]
            runs = router._runs.values()
            await until(lambda: len(runs) == 6 and all(len(r.log.ids) > 1 for r in runs))
            num_cuts = 0
            while not all(task.done() for task in asking):
                proxy.cut()
                num_cuts += 1
                await asyncio.wait(asking, timeout=0.1)
            answers = [task.result() for task in asking]
            router.check_integrity()
            assert router.fleet.num_bookings == 0
        assert num_cuts >= 2
        for number, answer in enumerate(answers):
            assert answer.ids == alone(number)
            assert len(answer.routed) == 1
            assert not answer.migrated
        assert await num_decoded(worker) == 6 * (NUM_TOKENS - 1)
        await worker.channel.close()
        await proxy.close()
        await nothing_held(prefill, decode)


async def test_a_real_prefill_worker_that_drains_refuses_prompts_at_no_cost(
    text_model: TextModel,
) -> None:
    async with (
        running_worker("p0", Role.PREFILL, SMALL_VOCABULARY) as draining,
        running_worker("p1", Role.PREFILL, SMALL_VOCABULARY) as prefill,
        running_worker("d0", Role.DECODE, SMALL_VOCABULARY) as decode,
    ):
        assert draining.prefill is not None
        draining.prefill.begin_drain()  # the registry has not heard of it yet
        listed = [Listed(worker, worker.address) for worker in (draining, prefill, decode)]
        once = dataclasses.replace(QUICK, max_attempts=1, retry_burst=0)
        async with router_over(text_model, *listed, config=once) as (router, client):
            answers = await asyncio.gather(*(client.ask(request_of(n)) for n in range(12)))
            assert router.metrics.failures.labels("DRAINING")._value.get() >= 1
            assert router.fleet.num_bookings == 0
        for number, answer in enumerate(answers):
            assert answer.ids == alone(number)
            assert answer.routed[-1].prefill_worker == "p1"
        await nothing_held(draining, prefill, decode)


def alone(number: int) -> list[int]:
    """The tokens that one engine gives for the request without anything in between."""
    request = request_of(number)
    prompt = np.asarray(request.token_ids.ids, dtype="<u4")
    spec = worker_pb2.RequestSpec(
        request_id=str(number),
        token_ids=prompt.tobytes(),
        num_prompt_tokens=len(prompt),
        sampling=request.sampling,
        seed=request.seed,
    )
    quick = dataclasses.replace(SMALL_VOCABULARY, fake=FakeEngineConfig(window=20, vocab_size=257))
    return engine_tokens(quick, read_spec(spec))


async def test_a_request_that_names_no_length_runs_to_the_end_of_its_worker_s_memory(
    text_model: TextModel,
) -> None:
    small = dataclasses.replace(
        SMALL_VOCABULARY, num_blocks=34, fake=FakeEngineConfig(window=20, vocab_size=257)
    )
    async with (
        running_worker("p0", Role.PREFILL, SMALL_VOCABULARY) as prefill,
        running_worker("d0", Role.DECODE, small) as decode,
    ):
        listed = Listed(prefill, prefill.address), Listed(decode, decode.address)
        async with router_over(text_model, *listed) as (router, client):
            request = request_of(0)
            request.sampling.ClearField("max_tokens")
            answer = await client.ask(request)
            assert len(answer.ids) == 33 * 8 + 1 - 20  # the last token's KV is never needed
            assert answer.finished is not None
            assert answer.finished.reason == common_pb2.FINISH_REASON_LENGTH
            assert not answer.migrated
            router.check_integrity()


async def test_a_prefill_worker_s_memory_bounds_the_prompt_alone_not_the_output(
    text_model: TextModel,
) -> None:
    small = dataclasses.replace(SMALL_VOCABULARY, num_blocks=6)  # of which one is the null block
    async with (
        running_worker("p0", Role.PREFILL, small) as prefill,
        running_worker("d0", Role.DECODE, SMALL_VOCABULARY) as decode,
    ):
        listed = Listed(prefill, prefill.address), Listed(decode, decode.address)
        async with router_over(text_model, *listed) as (_, client):
            answer = await client.ask(request_of(20))
            assert answer.ids == alone(20)
            assert [routed.prefill_worker for routed in answer.routed] == ["p0"]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.ask(request_of(21))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "every prefill worker" in str(caught.value.details())
        await nothing_held(prefill, decode)


async def test_a_prefill_worker_s_context_bounds_the_prompt_alone_not_the_output(
    text_model: TextModel,
) -> None:
    small = dataclasses.replace(SMALL_VOCABULARY, max_model_len=41)
    async with (
        running_worker("p0", Role.PREFILL, small) as prefill,
        running_worker("d0", Role.DECODE, SMALL_VOCABULARY) as decode,
    ):
        listed = Listed(prefill, prefill.address), Listed(decode, decode.address)
        async with router_over(text_model, *listed) as (_, client):
            answer = await client.ask(request_of(20))  # a prompt of 40 tokens
            assert answer.ids == alone(20)
            assert [routed.prefill_worker for routed in answer.routed] == ["p0"]
        await nothing_held(prefill, decode)


async def ask_with_logprobs(
    client: Client, request: router_pb2.GenerateRequest
) -> tuple[Answer, list[common_pb2.Logprobs]]:
    answer, logprobs = Answer(request.resume_from_index), list[common_pb2.Logprobs]()
    async for response in client.stub.Generate(request, timeout=20):
        answer.take(response)
        logprobs += response.tokens.logprobs
    return answer, logprobs


@pytest.mark.parametrize("max_message_bytes", [1 << 25, 1 << 12])
async def test_a_resumed_stream_has_the_log_probabilities_of_an_attempt_whose_worker_died(
    text_model: TextModel, max_message_bytes: int
) -> None:
    """As far as a message to the next worker could hold them; of the others it says so."""
    slow = FakeEngineConfig(window=20, vocab_size=257, decode_step_s=0.01)
    engine = dataclasses.replace(SMALL_VOCABULARY, fake=slow)
    async with (
        running_worker("p0", Role.PREFILL, engine) as prefill,
        running_worker("d0", Role.DECODE, engine) as first,
        running_worker("d1", Role.DECODE, engine) as second,
    ):
        decoders = [(worker, await Proxy.to(worker.address)) for worker in (first, second)]
        listed = [Listed(prefill, prefill.address), *(Listed(w, p.address) for w, p in decoders)]
        request = request_of(0)
        request.request_id, request.sampling.logprobs = "r", 20
        config = dataclasses.replace(
            QUICK, reattach_timeout_s=0.1, max_message_bytes=max_message_bytes
        )
        async with router_over(text_model, *listed, config=config) as (router, client):
            asking = asyncio.create_task(ask_with_logprobs(client, request))
            await until(lambda: any(len(run.log.ids) >= 12 for run in router._runs.values()))
            if not first.decode._runs:
                decoders.reverse()
            await decoders[0][1].close()
            answer, expected = await asking
            (migrated,) = answer.migrated
        worker, proxy = decoders[1]
        survivor = Listed(worker, proxy.address)
        request.resume_from_index = 8
        async with router_over(text_model, listed[0], survivor) as (_, client):
            resumed, told = await ask_with_logprobs(client, request)
        assert resumed.ids == alone(0)[8:]
        num_unknown = 0 if max_message_bytes > 1 << 12 else migrated.from_index - 8
        assert all(one.rank for one in expected)
        assert told[:num_unknown] == [common_pb2.Logprobs()] * num_unknown
        assert told[num_unknown:] == expected[8 + num_unknown :]
        await proxy.close()
