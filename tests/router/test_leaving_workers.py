"""Workers that drain or have left: what they refuse or drop goes elsewhere at no cost, and nobody
else is blamed for it."""

from __future__ import annotations

import asyncio

import pytest

from baton.fleet import WorkerState
from baton.v1 import control_pb2, worker_pb2
from router.fleet.registry import read_fleet
from tests.router.answers import PROMPT, ask_for, assert_whole, failures_of
from tests.router.deployment import Deployment, deployment, hung_prefill
from tests.router.scripted_tokens import Running

NO_RETRIES = {"max_attempts": 1, "burst": 0, "eject_s": 30.0}


def leaves(d: Deployment, worker_id: str) -> None:
    """The registry reports that the worker is gone, and the router takes it in."""
    d.worker(worker_id).state = control_pb2.WORKER_STATE_GONE
    workers = [worker.info() for worker in d.registry.workers]
    d.router.links.update(read_fleet(control_pb2.WatchFleetResponse(workers=workers)))


async def test_a_prefill_worker_that_left_before_it_was_asked_costs_nothing() -> None:
    async with deployment(prefill=1, decode=1, retries=NO_RETRIES) as d:
        since_s = d.entry("d0").state_since_s

        def leave() -> None:
            d.worker("d0").on_reserve = lambda: None
            leaves(d, "p0")

        d.worker("d0").on_reserve = leave
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT)))
        await d.until(lambda: d.router.fleet.get("p0") is None)
        await d.add_worker("p1", d.worker("p0").role)
        answer = await asking
        assert_whole(answer, PROMPT)
        assert answer.routed[-1].prefill_worker == "p1"
        assert not answer.migrated
        assert d.entry("d0").state is WorkerState.LIVE
        assert d.entry("d0").state_since_s == since_s


async def test_a_draining_prefill_worker_s_refusal_costs_nothing() -> None:
    async with deployment(prefill=2, decode=1, retries=NO_RETRIES) as d:
        for worker_id in ("p0", "p1"):
            d.worker(worker_id).faults.not_for_us = ["DRAINING"]
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT)))
        await d.until(lambda: d.worker("p0").num_prefills + d.worker("p1").num_prefills == 2)
        await d.registry.publish()  # the registry knows better: both are live
        answer = await asking
        assert_whole(answer, PROMPT)
        assert not answer.migrated
        assert (d.router.fleet.arrays.hold_until_s == 0).all()


@pytest.mark.parametrize("reason", ["FINGERPRINT", "REPLACED"])
async def test_a_prefill_worker_replaced_before_the_registry_says_so_costs_nothing(
    reason: str,
) -> None:
    changes = {**NO_RETRIES, "eject_s": 0.2}
    async with deployment(prefill=2, decode=1, retries=changes) as d:
        for worker_id in ("p0", "p1"):
            d.worker(worker_id).faults.not_for_us = [reason]
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)
        assert len(answer.routed) == 3  # each was held until it could be the right one again
        assert failures_of(d.router)[reason] == 2


async def test_a_prefill_worker_that_ends_while_it_drains_costs_nothing() -> None:
    async with deployment(prefill=2, decode=1, retries=NO_RETRIES) as d:
        asking, ends, other = await hung_prefill(d, ask_for(PROMPT))
        await drains(d, ends.worker_id)
        await ends.die()
        answer = await asking
        assert_whole(answer, PROMPT)
        assert [r.prefill_worker for r in answer.routed] == [ends.worker_id, other.worker_id]
        assert (d.router.fleet.arrays.hold_until_s == 0).all()


async def test_decode_workers_that_end_while_they_drain_make_no_request_poison() -> None:
    """Three in a row, as in a rolling restart whose drain is shorter than the request."""
    async with deployment(decode=4, retries=NO_RETRIES) as d:
        paused = asyncio.Event()

        def on_token(running: Running) -> None:
            if len(running.output) % 4 == 3:
                for worker in d.fabric.workers.values():
                    worker.may_decode.clear()
                paused.set()

        for number in range(4):
            d.worker(f"d{number}").on_token = on_token
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT, 20)))
        for _ in range(3):
            await asyncio.wait_for(paused.wait(), 10)
            paused.clear()
            (runs_at,) = [w for w in d.fabric.workers.values() if w.runs]
            await drains(d, runs_at.worker_id)
            await runs_at.die()
            for worker in d.fabric.workers.values():
                worker.may_decode.set()
        for worker in d.fabric.workers.values():
            worker.on_token = lambda running: None
            worker.may_decode.set()
        answer = await asking
        assert_whole(answer, PROMPT, 20)
        assert len({r.decode_worker for r in answer.routed}) == len(answer.routed) == 4
        assert len(answer.migrated) == 3


async def drains(d: Deployment, worker_id: str) -> None:
    """The registry reports it, and the router knows."""
    d.worker(worker_id).state = control_pb2.WORKER_STATE_DRAINING
    entry = d.entry(worker_id)
    await d.registry.publish()
    await d.until(lambda: entry.state is WorkerState.DRAINING)


async def test_a_draining_decode_worker_s_refusal_costs_nothing() -> None:
    async with deployment(decode=2, retries=NO_RETRIES) as d:
        for worker_id in ("d0", "d1"):
            d.worker(worker_id).faults.reject = [(worker_pb2.REJECT_REASON_DRAINING, 0)]
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT)))
        await d.until(lambda: d.worker("d0").num_reserves + d.worker("d1").num_reserves == 2)
        await d.registry.publish()
        assert_whole(await asking, PROMPT)
        assert (d.router.fleet.arrays.hold_until_s == 0).all()


async def test_a_prompt_at_a_prefill_worker_that_leaves_the_fleet_goes_on_at_once() -> None:
    async with deployment(prefill=2) as d:
        asking, leaving, _ = await hung_prefill(d, ask_for(PROMPT))
        leaving.state = control_pb2.WORKER_STATE_GONE
        await d.registry.publish()
        assert_whole(await asyncio.wait_for(asking, 10), PROMPT)


async def test_a_worker_that_leaves_while_it_is_asked_for_a_request_does_not_have_it() -> None:
    async with deployment(decode=2, timeouts={"attach_s": 20.0}) as d:
        d.worker("d1").faults.hang_attaches = 1
        request = ask_for(PROMPT, request_id="mine", resume_from_index=0)
        asking = asyncio.create_task(d.client.ask(request))
        await d.until(lambda: d.worker("d1").num_attaching == 1)
        d.worker("d1").state = control_pb2.WORKER_STATE_GONE
        await d.registry.publish()
        assert_whole(await asyncio.wait_for(asking, 10), PROMPT)
