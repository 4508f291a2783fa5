"""Every way a request can fail on its way: the client gets the fault-free tokens all the same."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from baton.status import from_rpc_error
from baton.v1 import common_pb2, worker_pb2
from router.text import TextModel
from tests.router.deployment import DECODE, ask_for, deployment
from tests.router.scripted_tokens import Running
from tests.router.scripted_worker import ScriptedWorker
from tests.router.test_requests import assert_whole

PROMPT = "the fox sang to the moon"


def error_reason(error: grpc.aio.AioRpcError) -> str:
    """The ErrorInfo reason of a failed call."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return info.reason


async def test_a_prefill_worker_that_fails_is_replaced_by_another(text_model: TextModel) -> None:
    async with deployment(text_model, prefill=2) as d:
        for worker in ("p0", "p1"):
            d.worker(worker).faults.fail_prefills = 1
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)
        assert len(answer.routed) == 3
        assert {r.prefill_worker for r in answer.routed[:2]} == {"p0", "p1"}
        assert not answer.migrated  # the client had seen nothing
        assert len(d.worker("d0").cancels) >= 2  # the leases of the failed attempts
        await d.check_empty()


async def test_a_prefill_worker_that_dies_before_the_first_token_is_replaced(
    text_model: TextModel,
) -> None:
    async with deployment(text_model, prefill=2) as d:
        for worker in ("p0", "p1"):
            d.worker(worker).faults.hang_prefills = 1
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT)))
        await d.until(lambda: d.worker("p0").num_prefilling + d.worker("p1").num_prefilling == 1)
        dying = "p0" if d.worker("p0").num_prefilling else "p1"
        d.worker("p0" if dying == "p1" else "p1").faults.hang_prefills = 0
        await d.worker(dying).die()
        assert_whole(await asking, PROMPT)
        await d.check_empty()


async def test_a_hung_prefill_worker_is_given_up_after_its_time(text_model: TextModel) -> None:
    async with deployment(text_model, prefill=2, first_token_timeout_s=0.2) as d:
        for worker in ("p0", "p1"):
            d.worker(worker).faults.hang_prefills = 1
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)
        assert len(answer.routed) == 3
        await d.check_empty()


async def test_a_failed_handoff_is_repeated_with_the_first_token_in_the_prompt(
    text_model: TextModel,
) -> None:
    async with deployment(text_model) as d:
        d.worker("p0").faults.fail_handoffs = 2
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)
        assert [m.from_index for m in answer.migrated] == [1, 2]
        assert d.worker("p0").prefilled_at == [len(PROMPT), len(PROMPT) + 1, len(PROMPT) + 2]
        await d.check_empty()


async def test_a_prefill_that_ends_without_a_handoff_is_repeated(text_model: TextModel) -> None:
    async with deployment(text_model) as d:
        d.worker("p0").faults.end_early = 1
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)
        assert len(answer.migrated) == 1
        await d.check_empty()


async def test_tokens_that_overtake_the_first_one_wait_for_it(text_model: TextModel) -> None:
    async with deployment(text_model) as d:
        d.worker("p0").faults.late_first_tokens = 1
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)
        assert len(answer.routed) == 1
        await d.check_empty()


async def test_a_handoff_given_up_because_the_first_token_ended_the_request_is_no_failure(
    text_model: TextModel,
) -> None:
    async with deployment(text_model) as d:
        d.worker("p0").faults.late_first_tokens = 1
        answer = await d.client.ask(ask_for(PROMPT, 1))
        assert_whole(answer, PROMPT, num_tokens=1)
        assert len(answer.ids) == len(answer.routed) == 1
        assert d.worker("p0").num_prefills == 1
        await d.check_empty()


def dies_at(index: int, worker: ScriptedWorker) -> None:
    """The worker dies when a request has put out this many tokens on it."""

    def on_token(running: Running) -> None:
        if len(running.output) == index:
            worker.die()

    worker.on_token = on_token


async def test_a_decode_worker_that_dies_mid_stream_is_continued_elsewhere(
    text_model: TextModel,
) -> None:
    async with deployment(text_model, decode=2) as d:
        for worker in ("d0", "d1"):
            dies_at(5, d.worker(worker))
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)
        assert len(answer.routed) == 2
        assert answer.routed[0].decode_worker != answer.routed[1].decode_worker
        assert len(answer.migrated) == 1
        assert 1 <= answer.migrated[0].from_index <= 5
        await d.check_empty()


async def test_a_frozen_decode_worker_is_left_after_its_silence(text_model: TextModel) -> None:
    async with deployment(text_model, decode=2, token_timeout_s=0.3) as d:
        for worker in ("d0", "d1"):
            w = d.worker(worker)
            w.on_token = lambda running, w=w: (  # type: ignore[misc]
                w.may_decode.clear()
                if len(running.output) == 3 and running.spec.attempt == 1
                else None
            )
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)
        assert len(answer.routed) == 2
        await d.check_empty()


async def test_a_worker_that_never_answers_a_reservation_is_left(text_model: TextModel) -> None:
    async with deployment(text_model, decode=2, reserve_timeout_s=0.2) as d:
        for worker in ("d0", "d1"):
            d.worker(worker).faults.hang_reservations = 1
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)
        await d.check_empty()


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


async def test_a_first_token_that_ends_the_request_releases_the_lease(
    text_model: TextModel,
) -> None:
    async with deployment(text_model) as d:
        answer = await d.client.ask(ask_for(PROMPT, 1))
        assert_whole(answer, PROMPT, 1)
        await d.check_empty()
        assert d.worker("d0").num_decode_steps == 0


async def test_workers_go_on_when_the_registry_is_gone_and_comes_back_empty(
    text_model: TextModel,
) -> None:
    async with deployment(text_model) as d:
        port = int(d.registry.address.rpartition(":")[2])
        await d.registry.stop()
        assert_whole(await d.client.ask(ask_for(PROMPT)), PROMPT)
        workers, d.registry.workers = d.registry.workers, []
        await d.registry.start(port)
        await d.until(lambda: d.router.watch.is_connected and not d.router.watch.last.workers)
        assert_whole(await d.client.ask(ask_for(PROMPT + "!")), PROMPT + "!")
        d.registry.workers = workers
        await d.registry.publish()
        assert_whole(await d.client.ask(ask_for(PROMPT + "?")), PROMPT + "?")
        await d.check_empty()


@pytest.mark.parametrize("incarnation", [2, 0], ids=["later", "its clock set back"])
async def test_a_restarted_worker_serves_again_under_its_new_incarnation(
    text_model: TextModel, incarnation: int
) -> None:
    async with deployment(text_model) as d:
        assert_whole(await d.client.ask(ask_for(PROMPT)), PROMPT)
        await d.worker("d0").die()
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT)))
        await d.add_worker("d0", DECODE, incarnation=incarnation)
        assert_whole(await asking, PROMPT)
        entry = d.router.fleet.get("d0")
        assert entry is not None
        assert entry.facts.incarnation == incarnation
        await d.check_empty()


async def test_a_mixed_fleet_serves_by_local_prefill_and_by_handoff(
    text_model: TextModel,
) -> None:
    async with deployment(text_model, 0, 0, mixed=2, local_prefill="auto") as d:
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)
    async with deployment(text_model, 0, 0, mixed=2, local_prefill="never") as d:
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)
        assert answer.routed[0].prefill_worker != answer.routed[0].decode_worker
    async with deployment(text_model, 1, 1, local_prefill="always") as d:
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)
        assert answer.routed[0].prefill_worker == ""
        assert len(answer.prefilled) == 1
        await d.check_empty()


async def test_a_frozen_session_s_backlog_loses_the_session_and_keeps_the_cancels() -> None:
    from router.session import RouterIdentity, Session, SessionLostError

    session = Session("d0", RouterIdentity("r", 1), max_backlog=2)
    session._outbox = asyncio.Queue(2)  # opened, and nobody reads
    for attempt in range(1, 4):
        session.cancel("mine", attempt)
    assert not session.is_open
    assert session.unconfirmed_cancels == [("mine", 1), ("mine", 2), ("mine", 3)]
    with pytest.raises(SessionLostError):
        session.reserve(worker_pb2.Reserve())


async def test_a_session_whose_backlog_overflows_is_opened_again_and_its_streams_go_on(
    text_model: TextModel,
) -> None:
    async with deployment(text_model, max_session_backlog=4) as d:
        worker = d.worker("d0")
        worker.may_decode.clear()
        asking = []
        for number in range(8):
            request = ask_for(f"{PROMPT} {number}", request_id=f"r{number}")
            asking.append(asyncio.create_task(d.client.ask(request)))
            await d.until(lambda n=number: d.worker("p0").num_prefills == n + 1)  # it is reserved
        for number in range(6):  # in one turn of the loop: more than the backlog
            d.router.abort("", f"r{number}")
        await d.until(lambda: worker.num_attaches >= 2)
        worker.may_decode.set()
        answers = await asyncio.gather(*asking)
        for number in (6, 7):
            assert_whole(answers[number], f"{PROMPT} {number}")
        await d.check_empty()


async def test_a_fault_of_ours_in_a_session_does_not_lose_the_worker(text_model: TextModel) -> None:
    async with deployment(text_model) as d:
        (link,) = (link for link in d.router.links if link.entry.facts.can_decode)
        dispatch, faults = link.session._dispatch, []

        def fail_once(response: worker_pb2.SessionResponse) -> None:
            link.session._dispatch = dispatch  # type: ignore[method-assign]
            faults.append(response)
            raise AssertionError("a fault of ours")

        link.session._dispatch = fail_once  # type: ignore[method-assign]
        assert_whole(await d.client.ask(ask_for(PROMPT)), PROMPT)
        assert len(faults) == 1
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
