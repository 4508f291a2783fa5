"""The router over real workers (fake engine, in-memory transfer) and a connection that breaks."""

from __future__ import annotations

import asyncio
import dataclasses

import grpc
import grpc.aio
import pytest

from baton.config.engine import FakeEngineConfig
from baton.config.settings import changed
from baton.fleet import Role
from baton.v1 import common_pb2, router_pb2
from tests.cluster.conftest import nothing_held, running_worker
from tests.router.answers import Answer, Client, failures_of, refusal
from tests.router.deployment import QUICK
from tests.router.proxy import Proxy
from tests.router.real_workers import (
    NUM_TOKENS,
    SMALL_VOCABULARY,
    Listed,
    alone,
    num_decoded,
    request_of,
    router_over,
    until,
)


async def test_a_connection_cut_again_and_again_repeats_no_step_of_a_real_worker() -> None:
    async with (
        running_worker("p0", Role.PREFILL, SMALL_VOCABULARY) as prefill,
        running_worker("d0", Role.DECODE, SMALL_VOCABULARY) as decode,
    ):
        proxy = await Proxy.to(decode.address)
        listed = Listed(prefill, prefill.address), Listed(decode, proxy.address)
        worker = decode.address
        async with router_over(*listed) as (router, client):
            asking = [asyncio.create_task(client.ask(request_of(n))) for n in range(6)]
            runs = router.runs
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
        await proxy.close()
        await nothing_held(prefill, decode)


async def test_a_real_prefill_worker_that_drains_refuses_prompts_at_no_cost() -> None:
    async with (
        running_worker("p0", Role.PREFILL, SMALL_VOCABULARY) as draining,
        running_worker("p1", Role.PREFILL, SMALL_VOCABULARY) as prefill,
        running_worker("d0", Role.DECODE, SMALL_VOCABULARY) as decode,
    ):
        assert draining.prefill is not None
        draining.prefill.begin_drain()  # the registry does not know of it yet
        listed = [Listed(worker, worker.address) for worker in (draining, prefill, decode)]
        once = changed(QUICK, retries={"max_attempts": 1, "burst": 0})
        async with router_over(*listed, config=once) as (router, client):
            answers = await asyncio.gather(*(client.ask(request_of(n)) for n in range(12)))
            assert failures_of(router)["DRAINING"] >= 1
            assert router.fleet.num_bookings == 0
        for number, answer in enumerate(answers):
            assert answer.ids == alone(number)
            assert answer.routed[-1].prefill_worker == "p1"
        await nothing_held(draining, prefill, decode)


async def test_a_request_that_names_no_length_runs_to_the_end_of_its_worker_s_memory() -> None:
    small = dataclasses.replace(
        SMALL_VOCABULARY, num_blocks=34, fake=FakeEngineConfig(window=20, vocab_size=257)
    )
    async with (
        running_worker("p0", Role.PREFILL, SMALL_VOCABULARY) as prefill,
        running_worker("d0", Role.DECODE, small) as decode,
    ):
        listed = Listed(prefill, prefill.address), Listed(decode, decode.address)
        async with router_over(*listed) as (router, client):
            request = request_of(0)
            request.sampling.ClearField("max_tokens")
            answer = await client.ask(request)
            assert len(answer.ids) == 33 * 8 + 1 - 20  # the last token's KV is never needed
            assert answer.reason == common_pb2.FINISH_REASON_LENGTH
            assert not answer.migrated
            router.check_integrity()


@pytest.mark.parametrize(
    "bound", [{"num_blocks": 6}, {"max_model_len": 41}], ids=["memory", "context"]
)
async def test_a_prefill_worker_s_bound_is_the_prompt_s_alone_not_the_output_s(
    bound: dict[str, int],
) -> None:
    small = dataclasses.replace(SMALL_VOCABULARY, **bound)  # one block is the null block
    async with (
        running_worker("p0", Role.PREFILL, small) as prefill,
        running_worker("d0", Role.DECODE, SMALL_VOCABULARY) as decode,
    ):
        listed = Listed(prefill, prefill.address), Listed(decode, decode.address)
        async with router_over(*listed) as (_, client):
            answer = await client.ask(request_of(20))  # a prompt of 40 tokens
            assert answer.ids == alone(20)
            assert [routed.prefill_worker for routed in answer.routed] == ["p0"]
            error = await refusal(client, request_of(21))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "every prefill worker" in str(error.details())
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
    max_message_bytes: int,
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
        config = changed(
            QUICK, timeouts={"reattach_s": 0.1}, clients={"max_message_bytes": max_message_bytes}
        )
        async with router_over(*listed, config=config) as (router, client):
            asking = asyncio.create_task(ask_with_logprobs(client, request))
            await until(lambda: any(len(run.log.ids) >= 12 for run in router.runs))
            if not first.decode.runs:
                decoders.reverse()
            await decoders[0][1].close()
            answer, expected = await asking
            (migrated,) = answer.migrated
        worker, proxy = decoders[1]
        survivor = Listed(worker, proxy.address)
        request.resume_from_index = 8
        async with router_over(listed[0], survivor) as (_, client):
            resumed, known = await ask_with_logprobs(client, request)
        assert resumed.ids == alone(0)[8:]
        num_unknown = 0 if max_message_bytes > 1 << 12 else migrated.from_index - 8
        assert all(one.rank for one in expected)
        assert known[:num_unknown] == [common_pb2.Logprobs()] * num_unknown
        assert known[num_unknown:] == expected[8 + num_unknown :]
        await proxy.close()
