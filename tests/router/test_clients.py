"""Clients that come, come back, come twice, leave, or are slow; and routers that vanish."""

from __future__ import annotations

import asyncio
import gc
import weakref

import grpc
import grpc.aio
import pytest

from baton.v1 import common_pb2, router_pb2, worker_pb2
from tests.router.answers import (
    PROMPT,
    Answer,
    ask_for,
    assert_whole,
    error_of,
    error_reason,
    expected,
    failures_of,
    refusal,
)
from tests.router.deployment import Deployment, attempts, deployment, left_behind
from tests.router.grpc_served import RawClient, framed
from tests.router.scripted_tokens import oracle


async def test_a_prompt_is_prefilled_in_one_pool_and_streams_from_the_other() -> None:
    async with deployment() as d:
        answer = await d.client.ask(ask_for("Once upon a time"))
        assert_whole(answer, "Once upon a time")
        assert answer.routed[0].prefill_worker == "p0"
        assert answer.routed[0].decode_worker == "d0"
        assert answer.routed[0].seed == 7
        assert len(answer.prefilled) == 1
        assert answer.handed_off[0].kv_bytes > 0
        assert answer.finished is not None
        assert answer.finished.usage.num_prompt_tokens == 16
        assert answer.finished.usage.num_output_tokens == 12
        assert answer.finished.timings.ttft_ms > 0


async def test_a_first_token_that_ends_the_request_releases_the_lease() -> None:
    async with deployment() as d:
        answer = await d.client.ask(ask_for(PROMPT, 1))
        assert_whole(answer, PROMPT, 1)
        await d.check_empty()
        assert d.worker("d0").num_decode_steps == 0


async def test_a_mixed_fleet_serves_by_local_prefill_and_by_handoff() -> None:
    async with deployment(0, 0, mixed=2, placement={"local_prefill": "auto"}) as d:
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)
    async with deployment(0, 0, mixed=2, placement={"local_prefill": "never"}) as d:
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)
        assert answer.routed[0].prefill_worker != answer.routed[0].decode_worker
    async with deployment(1, 1, placement={"local_prefill": "always"}) as d:
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)
        assert answer.routed[0].prefill_worker == ""
        assert len(answer.prefilled) == 1


async def paused_at(d: Deployment, request: router_pb2.GenerateRequest, index: int) -> Answer:
    """Ask, read `index` tokens, and leave with the workers paused."""

    def pause(running: object) -> None:
        if len(d.worker("d0").runs) and running.output and len(running.output) >= index:  # type: ignore[attr-defined]
            d.worker("d0").may_decode.clear()

    d.worker("d0").on_token = pause
    return await d.client.ask(request, until=lambda answer: len(answer.ids) >= index)


async def test_a_client_that_names_its_request_can_come_back_for_the_rest() -> None:
    async with deployment(clients={"resume_window_s": 20.0}) as d:
        request = ask_for(PROMPT, 20, request_id="mine")
        seen = await paused_at(d, request, 5)
        request.resume_from_index = len(seen.ids)
        d.worker("d0").may_decode.set()
        d.worker("d0").on_token = lambda running: None
        rest = await d.client.ask(request)
        assert seen.ids + rest.ids == expected(PROMPT, 20)
        assert seen.text + rest.text == bytes(expected(PROMPT, 20)).decode()
        assert d.worker("d0").num_reserves == 1


async def test_two_clients_of_one_request_see_the_same() -> None:
    async with deployment() as d:
        request = ask_for(PROMPT, 30, request_id="shared")
        answers = await asyncio.gather(*(d.client.ask(request) for _ in range(3)))
        for answer in answers:
            assert_whole(answer, PROMPT, 30)
        late = await d.client.ask(request)  # after its end it is remembered for a while
        assert_whole(late, PROMPT, 30)
        assert d.worker("d0").num_reserves == 1
        await d.check_empty()
        assert len(d.router.runs) == 1
        await d.until(lambda: len(d.router.runs) == 0)


async def test_of_finished_requests_the_output_is_remembered_up_to_so_many_bytes() -> None:
    async with deployment(clients={"resume_window_s": 20.0, "max_remembered_bytes": 10_000}) as d:
        for number in range(8):
            await d.client.ask(ask_for(PROMPT, request_id=f"r{number}"))
        await d.check_empty()
        kept = [run.request.head.request_id for run in d.router.runs]
        assert kept in (["r6", "r7"], ["r5", "r6", "r7"])
        assert all(len(run.request.token_ids) == 0 for run in d.router.runs)
        assert_whole(await d.client.ask(ask_for(PROMPT, request_id="r7")), PROMPT)
        assert d.worker("d0").num_reserves == 8


async def test_another_body_under_the_same_id_is_refused_but_not_in_another_tenant() -> None:
    async with deployment() as d:
        await d.client.ask(ask_for(PROMPT, request_id="a/b"))
        error = await refusal(d.client, ask_for("other", request_id="a/b"))
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        error = await refusal(d.client, ask_for(PROMPT, request_id="a/b", seed=8))
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        answer = await d.client.ask(ask_for("other", request_id="b", tenant="a"))
        assert_whole(answer, "other")


async def test_a_cancelled_call_ends_an_unnamed_request_at_every_hop_at_once() -> None:
    async with deployment(clients={"resume_window_s": 600.0}) as d:
        await paused_at(d, ask_for(PROMPT, 50), 3)
        await d.check_empty()
        assert len(d.worker("d0").cancels) == 1


async def test_a_call_cancelled_while_it_is_prefilled_cancels_the_prefill() -> None:
    async with deployment() as d:
        d.worker("p0").may_prefill.clear()
        call = d.client.stub.Generate(ask_for(PROMPT))
        await d.until(lambda: d.worker("p0").num_prefilling == 1)
        call.cancel()


async def test_a_named_request_without_clients_ends_after_the_resume_window() -> None:
    async with deployment(clients={"resume_window_s": 0.2}) as d:
        await paused_at(d, ask_for(PROMPT, 50, request_id="mine"), 3)
        assert d.router.num_active == 1


async def test_abort_ends_a_request_for_all_its_clients() -> None:
    async with deployment(clients={"resume_window_s": 600.0}) as d:
        d.worker("d0").may_decode.clear()
        request = ask_for(PROMPT, request_id="mine", tenant="t")
        asking = asyncio.create_task(d.client.ask(request))
        await d.until(lambda: bool(d.worker("d0").runs))
        for wrong in (("mine", "u"), ("other", "t")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await d.client.stub.Abort(
                    router_pb2.AbortRequest(request_id=wrong[0], tenant=wrong[1])
                )
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        await d.client.stub.Abort(router_pb2.AbortRequest(request_id="mine", tenant="t"))
        answer = await asking
        assert answer.reason == common_pb2.FINISH_REASON_ABORTED


async def test_a_slow_client_gets_its_tokens_coalesced_and_holds_nobody_up() -> None:
    async with deployment() as d:
        call = d.client.stub.Generate(ask_for(PROMPT, 300, request_id="slow"))
        await d.until(lambda: "slow" in d.worker("d0").finished)  # nothing was read so far
        answer = Answer()
        async for response in call:
            answer.take(response)
        assert_whole(answer, PROMPT, 300)


@pytest.mark.parametrize("request_id", ["", "mine"])
async def test_a_client_that_leaves_too_much_unread_is_cut_off(request_id: str) -> None:
    async with deployment(clients={"max_unread_bytes": 30_000, "resume_window_s": 20.0}) as d:
        request = ask_for(PROMPT, 400, request_id=request_id)
        async with RawClient.to(d.servers[0].address, window=100) as client:
            stream = client.ask(data=framed(request.SerializeToString()))
            await d.until(lambda: bool(d.router.runs))
            log = next(iter(d.router.runs)).log
            await d.until(lambda: not log.num_readers)
            if not request_id:
                await d.until(lambda: not d.router.runs)
                assert not log.ids, "its client is still there, and it is kept"
            client.h2.increment_flow_control_window(1 << 20, stream)
            client.flush()
            headers = await client.ended(stream)
            assert headers["grpc-status"] == "8"
            assert "unread" in headers["grpc-message"]
        if request_id:
            assert_whole(await d.client.ask(request), PROMPT, 400)


async def test_what_was_put_out_is_freed_with_its_last_client() -> None:
    async with deployment() as d:
        gc.disable()
        try:
            call = d.client.stub.Generate(ask_for(PROMPT, 200))
            await call.read()
            (run,) = d.router.runs
            kept = weakref.ref(run), weakref.ref(run.log)
            del run
            call.cancel()
            await d.until(lambda: not any(ref() for ref in kept))
        finally:
            gc.enable()


async def test_a_second_router_takes_over_what_the_first_one_left() -> None:
    async with deployment(prefill=1, decode=2) as d:
        for worker in ("d0", "d1"):
            w = d.worker(worker)
            w.on_token = lambda running, w=w: (  # type: ignore[misc]
                w.may_decode.clear() if len(running.output) == 6 else None
            )
        request = ask_for(PROMPT, 20)
        request.ClearField("seed")
        seen = await d.client.ask(request, until=lambda a: len(a.ids) >= 6 or bool(a.finished))
        # The first client left an unnamed request, so that one is gone. Now one that is named:
        request.request_id = "named"
        for worker in ("d0", "d1"):
            d.worker(worker).may_decode.set()
        seen = await d.client.ask(request, until=lambda a: len(a.ids) >= 6)
        seed = seen.routed[0].seed
        await d.servers[0].stop(0.0)
        await d.until(lambda: sum(len(d.worker(w).runs) for w in ("d0", "d1")) == 1)
        client = await d.add_router()
        for worker in ("d0", "d1"):
            d.worker(worker).on_token = lambda running: None
            d.worker(worker).may_decode.set()
        request.resume_from_index = len(seen.ids)
        rest = await client.ask(request)
        assert rest.routed[0].seed == seed
        assert seen.ids + rest.ids == oracle(list(PROMPT.encode()), seed, 20)
        whole = bytes(oracle(list(PROMPT.encode()), seed, 20)).decode()
        assert seen.text + rest.text == whole
        assert d.worker("d0").num_reserves + d.worker("d1").num_reserves == 2
        d.servers.pop(0)


async def test_a_request_found_nowhere_runs_again_with_its_seed() -> None:
    async with deployment() as d:
        answer = await d.client.ask(ask_for(PROMPT, request_id="lost", resume_from_index=4))
        assert_whole(answer, PROMPT)
        unseeded = ask_for(PROMPT, request_id="unseeded", resume_from_index=4)
        unseeded.ClearField("seed")
        error = await refusal(d.client, unseeded)
        assert error_reason(error) == "NOT_RESUMABLE"


@pytest.mark.parametrize(("prompt", "seed"), [("other", 7), (PROMPT, 8)])
async def test_resuming_with_another_body_or_seed_is_refused_and_takes_nothing_away(
    prompt: str, seed: int
) -> None:
    async with deployment() as d:
        d.worker("d0").may_decode.clear()
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT, request_id="mine")))
        await d.until(lambda: bool(d.worker("d0").runs))
        second = await d.add_router()
        asked = ask_for(prompt, request_id="mine", seed=seed, resume_from_index=1)
        error = await refusal(second, asked)
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        d.worker("d0").may_decode.set()
        assert_whole(await asyncio.wait_for(asking, 10), PROMPT)


async def test_abort_ends_a_request_that_is_still_looked_for_wherever_it_runs() -> None:
    async with deployment(decode=2, timeouts={"attach_s": 20.0}) as d:
        request = ask_for(PROMPT, request_id="mine")
        second = await d.add_router()
        await d.connected(3, d.routers[1])
        await left_behind(d, 0, "d0", request)
        d.worker("d1").faults.hang_attaches = 1
        request.resume_from_index = 0
        asking = asyncio.create_task(second.ask(request))
        await d.until(lambda: d.worker("d0").num_attaches == d.worker("d1").num_attaching == 1)
        assert d.worker("d0").runs
        await second.stub.Abort(router_pb2.AbortRequest(request_id="mine"))
        answer = await asking
        assert answer.reason == common_pb2.FINISH_REASON_ABORTED
        await d.until(lambda: not d.worker("d0").runs)


async def test_a_request_that_runs_is_resumed_where_the_line_is_full() -> None:
    async with deployment(admission={"max_queue": 1}) as d:
        second = await d.add_router()
        await d.connected(2, d.routers[1])
        request = ask_for(PROMPT, request_id="mine")
        await left_behind(d, 0, "d0", request)
        router = d.routers[1]
        router.fleet.arrays.max_running[:] = 0
        waiting = asyncio.create_task(second.ask(ask_for("another")))
        await d.until(lambda: len(router.admission) == 1)
        d.worker("d0").may_decode.set()
        request.resume_from_index = 0
        assert_whole(await second.ask(request), PROMPT)
        waiting.cancel()


async def test_a_request_that_its_worker_gave_up_goes_on_and_the_worker_is_not_blamed() -> None:
    async with deployment(retries={"eject_s": 30.0}) as d:
        second = await d.add_router()
        await d.connected(2, d.routers[1])
        request, worker = ask_for(PROMPT, request_id="mine"), d.worker("d0")
        await left_behind(d, 0, "d0", request)
        run = worker.finished["mine"] = worker.runs.pop("mine")
        run.finished = common_pb2.FINISH_REASON_ABORTED
        assert run.task is not None
        run.task.cancel()
        worker.may_decode.set()
        request.resume_from_index = 0
        assert_whole(await second.ask(request), PROMPT)
        router = d.routers[1]
        assert failures_of(router).keys() == {"GIVEN_UP"}
        assert not router.fleet.arrays.hold_until_s.any()


async def test_a_request_goes_on_though_another_body_runs_under_its_id_elsewhere() -> None:
    async with deployment(is_emptied=False, decode=2) as d:
        other, request = ask_for("other", request_id="mine"), ask_for(PROMPT, request_id="mine")
        await d.add_router()
        third = await d.add_router()
        for number in (1, 2):
            await d.connected(3, d.routers[number])
        await left_behind(d, 0, "d0", other)
        await left_behind(d, 1, "d1", request)
        request.resume_from_index = 0
        d.worker("d1").may_decode.set()
        answer = await third.ask(request)
        assert_whole(answer, PROMPT)
        assert d.worker("d1").num_reserves == 1
        assert list(d.worker("d0").runs) == ["mine"]  # left where it is
        assert d.worker("d0").num_attaches == 0


async def test_a_lost_session_takes_nothing_from_the_router_that_went_on_with_the_request() -> None:
    async with deployment() as d:
        worker, prefill = d.worker("d0"), d.worker("p0")
        worker.may_decode.clear()
        prefill.faults.hang_prefills = 1
        worker.faults.lose_moves = 1
        request = ask_for(PROMPT, request_id="mine")
        second = await d.add_router()
        await d.connected(2, d.routers[1])
        first_asking = asyncio.create_task(d.client.ask(request))
        await d.until(lambda: prefill.num_prefilling == 1 and prefill.faults.hang_prefills == 0)
        former = worker.runs["mine"].router_id
        assert former is not None
        request.resume_from_index = 0
        asking = asyncio.create_task(second.ask(request))
        await d.until(lambda: worker.num_attaches == 1)
        worker.give_up(worker_pb2.Lease(lease_id=worker.runs["mine"].lease_id))
        await d.until(lambda: "mine" in worker.runs and worker.runs["mine"].task is not None)
        worker.session_calls[former].cancel()  # only now does the first router ask for its own
        await d.until(lambda: any(state.has_moved for state in attempts(d.router)))
        prefill.unhang.set()  # its lease is fenced
        assert (await error_of(first_asking)).code() is grpc.StatusCode.UNAVAILABLE
        worker.may_decode.set()
        answer = await asking
        assert_whole(answer, PROMPT)
        assert [routed.attempt for routed in answer.routed] == [1, 2]
        assert worker.num_attaches == 1
        assert worker.num_reserves == 2


async def test_an_adopted_request_survives_its_decode_worker() -> None:
    async with deployment(decode=2) as d:
        for worker in ("d0", "d1"):
            w = d.worker(worker)
            w.on_token = lambda running, w=w: (  # type: ignore[misc]
                w.may_decode.clear() if len(running.output) == 6 else None
            )
        request = ask_for(PROMPT, 20, request_id="named")
        seen = await d.client.ask(request, until=lambda a: len(a.ids) >= 6)
        await d.servers[0].stop(0.0)
        client = await d.add_router()
        request.resume_from_index = len(seen.ids)
        asking = asyncio.create_task(client.ask(request))
        running = next(w for w in ("d0", "d1") if d.worker(w).runs)
        other = next(w for w in ("d0", "d1") if w != running)
        await d.until(lambda: d.routers[1].fleet.num_bookings == 1)
        d.worker(other).on_token = lambda running: None
        await d.worker(running).die()
        rest = await asking
        assert seen.ids + rest.ids == expected(PROMPT, 20)
        assert len(rest.migrated) == 1
        d.servers.pop(0)
