"""What is tried again, at whose cost, and what ends a request and how its client is told."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from baton.status import from_rpc_error
from baton.v1 import common_pb2, worker_pb2
from router.text import TextModel
from tests.router.deployment import PROMPT, ask_for, deployment, error_reason
from tests.router.test_requests import assert_whole


async def test_no_capacity_puts_a_request_back_in_line_at_no_cost(text_model: TextModel) -> None:
    async with deployment(text_model, max_attempts=1) as d:
        d.worker("d0").faults.reject = [(worker_pb2.REJECT_REASON_NO_CAPACITY, 20)] * 5
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)
        assert d.worker("d0").num_reserves == 6
        assert [routed.attempt for routed in answer.routed] == [
            6
        ]  # where it was not taken is not told
        await d.check_empty()


async def test_a_draining_worker_gets_nothing_more(text_model: TextModel) -> None:
    async with deployment(text_model, decode=2, max_attempts=1) as d:
        for worker in ("d0", "d1"):
            d.worker(worker).faults.reject = [(worker_pb2.REJECT_REASON_DRAINING, 0)]
        first = d.worker("d0").num_reserves + d.worker("d1").num_reserves
        assert first == 0
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT)))
        await d.until(lambda: d.worker("d0").num_reserves + d.worker("d1").num_reserves == 2)
        await d.registry.publish()  # the registry knows better: both are live
        assert_whole(await asking, PROMPT)
        await d.check_empty()


async def test_a_stale_attempt_number_is_raised_above_the_worker_s(text_model: TextModel) -> None:
    """At no cost: not to the retry budget, nor to the worker, which did nothing wrong."""
    async with deployment(text_model, decode=2, max_attempts=1, retry_burst=0) as d:
        for worker_id in ("d0", "d1"):
            d.worker(worker_id).last_attempt["mine"] = 9
        answer = await d.client.ask(ask_for(PROMPT, request_id="mine"))
        assert_whole(answer, PROMPT)
        assert answer.routed[-1].attempt > 9
        assert (d.router.fleet.arrays.hold_until_s == 0).all()
        await d.check_empty()


async def test_a_worker_that_calls_every_attempt_stale_ends_the_request(
    text_model: TextModel,
) -> None:
    async with deployment(text_model) as d:
        d.worker("d0").last_attempt["mine"] = 1 << 31
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await d.client.ask(ask_for(PROMPT, request_id="mine"))
        assert error_reason(caught.value) == "WORKER_LOST"
        await d.check_empty()


async def test_what_a_worker_calls_invalid_is_told_and_not_retried(text_model: TextModel) -> None:
    async with deployment(text_model) as d:
        d.worker("d0").faults.reject = [(worker_pb2.REJECT_REASON_INVALID, 0)]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await d.client.ask(ask_for(PROMPT))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert from_rpc_error(caught.value).field == "token_ids"
        assert d.worker("d0").num_reserves == 1
        await d.check_empty()


async def test_a_prompt_the_prefill_worker_calls_invalid_is_not_retried(
    text_model: TextModel,
) -> None:
    async with deployment(text_model) as d:
        d.worker("p0").faults.refuse_prefills = 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await d.client.ask(ask_for(PROMPT))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert from_rpc_error(caught.value).field == "sampling.top_k"
        assert d.worker("p0").num_prefills == 1
        await d.check_empty()


async def test_a_request_that_two_workers_cannot_read_is_refused_and_ejects_nobody(
    text_model: TextModel,
) -> None:
    async with deployment(text_model, decode=3, eject_s=30.0) as d:
        for name in ("d0", "d1", "d2"):
            d.worker(name).faults.reject = [(worker_pb2.REJECT_REASON_INTERNAL, 0)] * 3
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await d.client.ask(ask_for(PROMPT))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert sum(d.worker(name).num_reserves for name in ("d0", "d1", "d2")) == 2
        assert not any(d.router.fleet.arrays.hold_until_s > d.router.clock())
        await d.check_empty()


async def test_a_worker_that_rejects_what_another_takes_in_is_ejected(
    text_model: TextModel,
) -> None:
    async with deployment(text_model, decode=2, eject_s=30.0) as d:
        d.worker("d0").faults.reject = [(worker_pb2.REJECT_REASON_INTERNAL, 0)] * 100
        await asyncio.gather(*(d.client.ask(ask_for(PROMPT)) for _ in range(4)))
        for _ in range(8):
            assert_whole(await d.client.ask(ask_for(PROMPT)), PROMPT)
        assert 1 <= d.worker("d0").num_reserves <= 4  # as many as were on their way
        await d.check_empty()


async def test_a_worker_that_rejects_a_request_and_then_takes_it_in_is_not_ejected(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it would be spared for being the only one left, it is not even asked for."""
    asked_for: list[str] = []
    async with deployment(text_model, decode=2, eject_s=30.0) as d:
        monkeypatch.setattr(
            d.router.fleet, "eject", lambda entry, _: asked_for.append(entry.facts.worker_id)
        )
        d.worker("d0").faults.reject = [(worker_pb2.REJECT_REASON_INTERNAL, 0)]
        d.worker("d1").faults.reject = [(worker_pb2.REJECT_REASON_NO_CAPACITY, 60_000)]
        while not d.worker("d0").num_reserves:  # ties are drawn
            assert_whole(await d.client.ask(ask_for(PROMPT)), PROMPT)
        assert d.worker("d0").num_reserves > 1
        assert not asked_for
        await d.check_empty()


async def test_one_worker_that_rejects_a_request_twice_is_not_two(text_model: TextModel) -> None:
    async with deployment(text_model) as d:
        d.worker("d0").faults.reject = [(worker_pb2.REJECT_REASON_INTERNAL, 0)] * 2
        assert_whole(await d.client.ask(ask_for(PROMPT)), PROMPT)
        await d.check_empty()


async def test_a_request_that_ran_on_two_workers_that_died_is_poison(
    text_model: TextModel,
) -> None:
    async with deployment(text_model, decode=3) as d:
        for number in range(3):
            worker = d.worker(f"d{number}")
            worker.on_token = lambda running, w=worker: w.die()  # type: ignore[misc]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await d.client.ask(ask_for(PROMPT))
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert error_reason(caught.value) == "POISON"
        assert len(d.fabric.workers) == 2  # one prefill worker, one decode worker left alive
        await d.check_empty()


async def test_retries_end_with_the_last_failure(text_model: TextModel) -> None:
    async with deployment(text_model, max_attempts=3) as d:
        d.worker("p0").faults.fail_prefills = 10
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await d.client.ask(ask_for(PROMPT))
        assert error_reason(caught.value) == "KV_TRANSFER_FAILED"
        assert d.worker("p0").num_prefills == 3
        await d.check_empty()


async def test_a_used_up_retry_budget_ends_a_request_at_its_first_failure(
    text_model: TextModel,
) -> None:
    async with deployment(text_model, tenant_retry_burst=1, tenant_retry_per_s=0.0) as d:
        d.worker("p0").faults.fail_prefills = 2
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await d.client.ask(ask_for(PROMPT))
        assert "retry budget" in (caught.value.details() or "")
        assert d.worker("p0").num_prefills == 2
        await d.check_empty()


async def test_a_deadline_aborts_everywhere(text_model: TextModel) -> None:
    async with deployment(text_model) as d:
        d.worker("d0").may_decode.clear()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await d.client.ask(ask_for(PROMPT, timeout_ms=300))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert error_reason(caught.value) == "DEADLINE"
        await d.check_empty()


async def test_a_deadline_that_the_decode_worker_sees_first_is_told_as_one(
    text_model: TextModel,
) -> None:
    async with deployment(text_model) as d:
        worker = d.worker("d0")
        worker.may_decode.clear()
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT, request_id="mine")))
        await d.until(lambda: "mine" in worker.runs and worker.runs["mine"].task is not None)
        running = worker.runs["mine"]
        over = worker._tokens(running, len(running.output))
        over.finished, over.error = common_pb2.FINISH_REASON_ABORTED, "deadline"
        worker._tell(running.router_id, tokens=[over])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asking
        assert error_reason(caught.value) == "DEADLINE"
