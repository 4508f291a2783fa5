"""What is tried again, at whose cost, and what ends a request and what its client sees."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from baton.status import from_rpc_error
from baton.v1 import common_pb2, worker_pb2
from tests.router.answers import PROMPT, ask_for, assert_whole, error_of, error_reason, refusal
from tests.router.deployment import deployment


async def test_no_capacity_puts_a_request_back_in_line_at_no_cost() -> None:
    async with deployment(retries={"max_attempts": 1}) as d:
        d.worker("d0").faults.reject = [(worker_pb2.REJECT_REASON_NO_CAPACITY, 20)] * 5
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)
        assert d.worker("d0").num_reserves == 6
        assert [routed.attempt for routed in answer.routed] == [
            6
        ]  # refused placements are not shown


async def test_a_stale_attempt_number_is_raised_above_the_worker_s() -> None:
    """At no cost: not to the retry budget, nor to the worker, which did nothing wrong."""
    async with deployment(decode=2, retries={"max_attempts": 1, "burst": 0}) as d:
        for worker_id in ("d0", "d1"):
            d.worker(worker_id).last_attempt["mine"] = 9
        answer = await d.client.ask(ask_for(PROMPT, request_id="mine"))
        assert_whole(answer, PROMPT)
        assert answer.routed[-1].attempt > 9
        assert (d.router.fleet.arrays.hold_until_s == 0).all()


async def test_a_worker_that_calls_every_attempt_stale_ends_the_request() -> None:
    async with deployment() as d:
        d.worker("d0").last_attempt["mine"] = 1 << 31
        error = await refusal(d.client, ask_for(PROMPT, request_id="mine"))
        assert error_reason(error) == "WORKER_LOST"


async def test_what_a_worker_calls_invalid_is_reported_and_not_retried() -> None:
    async with deployment() as d:
        d.worker("d0").faults.reject = [(worker_pb2.REJECT_REASON_INVALID, 0)]
        d.worker("p0").faults.refuse_prefills = 1
        for worker_field, said in (("token_ids", ""), ("sampling.top_k", " refusal")):  # d0's, p0's
            error = await refusal(d.client, ask_for(PROMPT))
            assert error.details() == f"{worker_field}: scripted{said}"
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert from_rpc_error(error).field == worker_field
        assert (d.worker("d0").num_reserves, d.worker("p0").num_prefills) == (2, 1)


async def test_a_request_that_two_workers_cannot_read_is_refused_and_ejects_nobody() -> None:
    async with deployment(decode=3, retries={"eject_s": 30.0}) as d:
        for name in ("d0", "d1", "d2"):
            d.worker(name).faults.reject = [(worker_pb2.REJECT_REASON_INTERNAL, 0)] * 3
        error = await refusal(d.client, ask_for(PROMPT))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert sum(d.worker(name).num_reserves for name in ("d0", "d1", "d2")) == 2
        assert not any(d.router.fleet.arrays.hold_until_s > d.router.clock.now_s())


async def test_a_worker_that_rejects_what_another_takes_in_is_ejected() -> None:
    async with deployment(decode=2, retries={"eject_s": 30.0}) as d:
        d.worker("d0").faults.reject = [(worker_pb2.REJECT_REASON_INTERNAL, 0)] * 100
        await asyncio.gather(*(d.client.ask(ask_for(PROMPT)) for _ in range(4)))
        for _ in range(8):
            assert_whole(await d.client.ask(ask_for(PROMPT)), PROMPT)
        assert 1 <= d.worker("d0").num_reserves <= 4  # as many as were on their way


async def test_a_worker_that_rejects_a_request_and_then_takes_it_in_is_not_ejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it would be spared for being the only one left, it is not even asked for."""
    asked_for: list[str] = []
    async with deployment(decode=2, retries={"eject_s": 30.0}) as d:
        monkeypatch.setattr(
            d.router.fleet, "eject", lambda entry, _: asked_for.append(entry.facts.worker_id)
        )
        d.worker("d0").faults.reject = [(worker_pb2.REJECT_REASON_INTERNAL, 0)]
        d.worker("d1").faults.reject = [(worker_pb2.REJECT_REASON_NO_CAPACITY, 60_000)]
        while not d.worker("d0").num_reserves:  # ties are drawn
            assert_whole(await d.client.ask(ask_for(PROMPT)), PROMPT)
        assert d.worker("d0").num_reserves > 1
        assert not asked_for


async def test_one_worker_that_rejects_a_request_twice_is_not_two() -> None:
    async with deployment() as d:
        d.worker("d0").faults.reject = [(worker_pb2.REJECT_REASON_INTERNAL, 0)] * 2
        assert_whole(await d.client.ask(ask_for(PROMPT)), PROMPT)


async def test_a_request_that_ran_on_two_workers_that_died_is_poison() -> None:
    async with deployment(decode=3) as d:
        for number in range(3):
            worker = d.worker(f"d{number}")
            worker.on_token = lambda running, w=worker: w.die()  # type: ignore[misc]
        error = await refusal(d.client, ask_for(PROMPT))
        assert error.code() is grpc.StatusCode.ABORTED
        assert error_reason(error) == "POISON"
        assert len(d.fabric.workers) == 2  # one prefill worker, one decode worker left alive


async def test_retries_end_with_the_last_failure() -> None:
    async with deployment(retries={"max_attempts": 3}) as d:
        d.worker("p0").faults.fail_prefills = 10
        error = await refusal(d.client, ask_for(PROMPT))
        assert error_reason(error) == "KV_TRANSFER_FAILED"
        assert d.worker("p0").num_prefills == 3


async def test_a_used_up_retry_budget_ends_a_request_at_its_first_failure() -> None:
    async with deployment(retries={"tenant_burst": 1, "tenant_refill_per_s": 0.0}) as d:
        d.worker("p0").faults.fail_prefills = 2
        error = await refusal(d.client, ask_for(PROMPT))
        assert "retry budget" in (error.details() or "")
        assert d.worker("p0").num_prefills == 2


async def test_a_deadline_aborts_everywhere() -> None:
    async with deployment() as d:
        d.worker("d0").may_decode.clear()
        error = await refusal(d.client, ask_for(PROMPT, timeout_ms=300))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert error_reason(error) == "DEADLINE"


async def test_a_deadline_that_the_decode_worker_sees_first_is_reported_as_one() -> None:
    async with deployment(is_emptied=False) as d:
        worker = d.worker("d0")
        worker.may_decode.clear()
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT, request_id="mine")))
        await d.until(lambda: "mine" in worker.runs and worker.runs["mine"].task is not None)
        running = worker.runs["mine"]
        over = worker.tokens_of(running, len(running.output))
        over.finished, over.error = common_pb2.FINISH_REASON_ABORTED, "deadline"
        worker.send(running.router_id, tokens=[over])
        assert error_reason(await error_of(asking)) == "DEADLINE"
