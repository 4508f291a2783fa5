"""Which worker a failure counts against, and how long a worker is waited for and believed."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import numpy as np
import pytest

from baton.clock import ManualClock
from baton.v1 import control_pb2, worker_pb2
from router.fleet.registry import read_fleet
from tests.router.answers import PROMPT, ask_for, assert_whole
from tests.router.deployment import Deployment, deployment, held, hung_prefill
from tests.router.fleets import admission_of, entry_of, facts, fleet_of, place, prompt
from tests.router.scripted_worker import ScriptedWorker


def of_two(d: Deployment, role: str) -> list[ScriptedWorker]:
    return [d.worker(f"{role}0"), d.worker(f"{role}1")]


async def test_a_handoff_that_never_ends_counts_against_its_writer() -> None:
    async with deployment(2, 2, timeouts={"token_s": 0.3}, retries={"eject_s": 30.0}) as d:
        for worker in of_two(d, "p"):
            worker.faults.hang_handoffs = 1
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)
        prefills = [routed.prefill_worker for routed in answer.routed]
        assert prefills[:2] in (["p0", "p1"], ["p1", "p0"])
        assert not held(d) & {"d0", "d1"}


async def test_a_handoff_to_a_suspect_decode_worker_leaves_it_soon() -> None:
    async with deployment(
        1, 2, timeouts={"suspect_silence_s": 0.2}, retries={"eject_s": 30.0}
    ) as d:
        d.worker("p0").faults.hang_handoffs = 1
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT)))
        await d.until(lambda: any(worker.runs for worker in of_two(d, "d")))
        stuck, other = sorted(of_two(d, "d"), key=lambda worker: not worker.runs)
        stuck.state = control_pb2.WORKER_STATE_SUSPECT
        await d.registry.publish()
        answer = await asyncio.wait_for(asking, 10)
        assert_whole(answer, PROMPT)
        assert [r.decode_worker for r in answer.routed] == [stuck.worker_id, other.worker_id]
        assert held(d) <= {stuck.worker_id}


async def test_a_writer_that_lost_its_receiver_is_not_blamed_for_it() -> None:
    async with deployment(2, 2, retries={"eject_s": 30.0}) as d:
        for worker in of_two(d, "p"):
            worker.faults.fail_handoffs = 1
            worker.faults.handoff_reason = "PEER_LOST"
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)
        decodes = [routed.decode_worker for routed in answer.routed]
        assert decodes[:2] in (["d0", "d1"], ["d1", "d0"])
        assert not held(d) & {"p0", "p1"}


async def test_a_writer_too_slow_to_serve_its_lease_is_blamed_also_when_it_says_so_first() -> None:
    async with deployment(3, 1, retries={"eject_s": 30.0}) as d:
        for worker in (d.worker(f"p{n}") for n in range(3)):
            worker.faults.late_prefills = 1
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)
        assert held(d) == {answer.routed[0].prefill_worker}  # a third of the pool
        assert len({routed.prefill_worker for routed in answer.routed[:3]}) == 3


async def test_a_handoff_that_another_router_began_is_nobody_s_fault_here() -> None:
    async with deployment(2, 2, retries={"eject_s": 30.0}) as d:
        for worker in of_two(d, "p"):
            worker.faults.hang_prefills = 1
        request = ask_for(PROMPT, request_id="mine")
        second = await d.add_router()
        await d.connected(4, d.routers[1])
        first = asyncio.create_task(d.client.ask(request))
        await d.until(lambda: any(worker.runs for worker in of_two(d, "d")))
        decode = next(worker for worker in of_two(d, "d") if worker.runs)
        await d.until(lambda: any(worker.num_prefilling for worker in of_two(d, "p")))
        for worker in of_two(d, "p"):
            worker.faults.hang_prefills = 0
        await d.servers[0].stop(0.0)
        with pytest.raises(grpc.aio.AioRpcError):
            await first
        request.resume_from_index = 0
        asking = asyncio.create_task(second.ask(request))
        await d.until(lambda: decode.num_attaches == 1)
        decode.give_up(worker_pb2.Lease(lease_id=decode.runs["mine"].lease_id))
        assert_whole(await asking, PROMPT)
        d.servers.pop(0)
        assert not held(d)


async def test_a_stream_that_stands_still_while_others_flow_is_no_fault_of_its_worker() -> None:
    """As one does that was preempted because memory was full."""
    async with deployment(timeouts={"token_s": 0.2}, retries={"eject_s": 30.0}) as d:
        worker, loop = d.worker("d0"), asyncio.get_running_loop()
        worker.step_s = 0.01
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT, request_id="mine")))
        other = asyncio.create_task(d.client.ask(ask_for("another", 300)))
        await d.until(lambda: len(worker.runs) == 2 and worker.runs["mine"].task is not None)
        preempted = worker.runs["mine"]
        assert preempted.task is not None
        preempted.task.cancel()
        until_s = loop.time() + 0.6
        await d.until(lambda: loop.time() > until_s)
        preempted.task = asyncio.ensure_future(worker.decode(preempted))
        answer = await asking
        assert_whole(answer, PROMPT)
        assert len(answer.routed) == 1
        assert not held(d)
        assert not other.done()
        other.cancel()


async def test_a_prompt_that_waits_at_a_writer_whose_other_prompts_come_out_stays_there() -> None:
    limits = {"first_token_s": 0.5, "token_s": 0.5}
    async with deployment(retries={"eject_s": 30.0}, timeouts=limits) as d:
        worker, loop = d.worker("p0"), asyncio.get_running_loop()
        worker.faults.hang_prefills = 1
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT)))
        await d.until(lambda: worker.num_prefilling == 1)
        until_s = loop.time() + 1.2
        while loop.time() < until_s:
            assert_whole(await d.client.ask(ask_for("another")), "another")
        worker.unhang.set()
        answer = await asking
        assert_whole(answer, PROMPT)
        assert len(answer.routed) == 1
        assert not held(d)


async def test_a_request_that_is_attached_before_its_first_token_is_waited_for() -> None:
    async with deployment(retries={"eject_s": 30.0}, timeouts={"token_s": 0.2}) as d:
        prefill, loop = d.worker("p0"), asyncio.get_running_loop()
        prefill.faults.hang_prefills = 1
        second = await d.add_router()
        await d.connected(2, d.routers[1])
        first = asyncio.create_task(d.client.ask(ask_for(PROMPT, request_id="mine")))
        await d.until(lambda: prefill.num_prefilling == 1)
        request = ask_for(PROMPT, request_id="mine", resume_from_index=0)
        asking = asyncio.create_task(second.ask(request))
        await d.until(lambda: prefill.num_prefills == 2)
        until_s = loop.time() + 0.8
        await d.until(lambda: loop.time() > until_s)
        prefill.unhang.set()
        answer = await asking
        assert_whole(answer, PROMPT)
        assert [routed.attempt for routed in answer.routed] == [1]
        first.cancel()


async def test_a_failure_is_not_held_against_the_worker_that_took_the_row_over() -> None:
    clock = ManualClock(100.0)
    fleet = fleet_of(
        facts("p0", True, False), facts("d0", False, True), facts("d1", False, True), clock=clock
    )
    admission = admission_of(fleet, clock)
    failed, spare = entry_of(fleet, "d0"), entry_of(fleet, "d1")
    ticket = admission.ticket(prompt(10), 4)
    ticket.failed.add(failed.facts.identity)
    assert (await place(admission, ticket)).placement.decode_worker == "d1"
    fleet.remove(failed)
    again = fleet.add(facts("d0", False, True, incarnation=2))
    assert again.slot == failed.slot
    fleet.set_state(again, spare.state)
    fleet.set_connected(again, True)
    assert (await place(admission, ticket)).placement.decode_worker == "d0"  # d1 has one already


async def test_others_load_is_forgotten_when_nobody_reports_it_any_more() -> None:
    async with deployment(admission={"fleet_wait_s": 60.0}) as d:
        worker = d.worker("d0")
        worker.load.num_running = worker.max_num_seqs  # another router's
        await d.registry.publish()
        await d.until(lambda: d.router.fleet.arrays.running.max() == worker.max_num_seqs)
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT)))
        await d.until(lambda: len(d.router.admission) == 1)
        await d.registry.stop()
        assert_whole(await asyncio.wait_for(asking, 5), PROMPT)


async def test_workers_of_another_model_are_forgotten_when_they_are_gone() -> None:
    async with deployment() as d:
        for number in range(3):
            stranger = d.worker("p0").info()
            stranger.info.model = "another"
            stranger.info.ref.worker_id = f"stranger-{number}"
            d.router.links.update(read_fleet(control_pb2.WatchFleetResponse(workers=[stranger])))
        assert d.router.links.refused == {"stranger-2"}


LONG = "x" * 500


async def test_a_step_that_nothing_predicts_may_take_as_long_as_the_registry_lets_it() -> None:
    clock = ManualClock(100.0)
    async with deployment(prefill=2, clock=clock) as d:
        asking, asked, _ = await hung_prefill(d, ask_for(LONG))
        clock.advance(119.0)
        asked.may_prefill.set()
        answer = await asking
        assert_whole(answer, LONG)
        assert [routed.prefill_worker for routed in answer.routed] == [asked.worker_id]


async def test_a_prompt_that_two_live_workers_have_lost_is_given_up_by_each_after_its_time() -> (
    None
):
    clock = ManualClock(100.0)
    async with deployment(prefill=2, clock=clock) as d:
        workers = [d.worker("p0"), d.worker("p1")]
        for worker in workers:
            worker.faults.hang_prefills = 1
        asking = asyncio.create_task(d.client.ask(ask_for(LONG)))
        for number in (1, 2):
            await d.until(lambda n=number: sum(w.num_prefills for w in workers) == n)  # type: ignore[misc]
            await d.until(lambda: sum(w.num_prefilling for w in workers) == 1)
            clock.advance(151.0)
        answer = await asking
        assert_whole(answer, LONG)
        assert len(answer.routed) == 3


@pytest.mark.parametrize("is_given_up", [False, True])
async def test_what_a_worker_reports_of_its_speed_meanwhile_is_what_its_prompt_is_waited_for(
    is_given_up: bool,
) -> None:
    """500 tokens at 2 a second; and some time on top, after which the prompt is lost there."""
    clock = ManualClock(100.0)
    async with deployment(prefill=2, clock=clock, timeouts={"first_token_s": 30.0}) as d:
        asking, asked, other = await hung_prefill(d, ask_for(LONG))
        asked.load.prefill_tokens_per_s = 2.0  # after its first chunk
        await d.registry.publish()
        await d.until(lambda: bool(np.isfinite(d.router.fleet.arrays.prefill_measured_s).any()))
        clock.advance(281.0 if is_given_up else 279.0)
        asked.may_prefill.set()
        answer = await asking
        assert_whole(answer, LONG)
        where = [asked, other] if is_given_up else [asked]
        assert [routed.prefill_worker for routed in answer.routed] == [w.worker_id for w in where]
