"""Workers that fail, hang or die under a request: the client gets the fault-free tokens all the
same."""

from __future__ import annotations

import asyncio

import pytest

from router.request.machine import Phase
from tests.router.answers import PROMPT, ask_for, assert_whole
from tests.router.deployment import DECODE, attempts, deployment, hung_prefill
from tests.router.scripted_tokens import Running
from tests.router.scripted_worker import ScriptedWorker


async def test_a_prefill_worker_that_fails_is_replaced_by_another() -> None:
    async with deployment(prefill=2) as d:
        for worker in ("p0", "p1"):
            d.worker(worker).faults.fail_prefills = 1
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)
        assert len(answer.routed) == 3
        assert {r.prefill_worker for r in answer.routed[:2]} == {"p0", "p1"}
        assert not answer.migrated  # the client had seen nothing
        assert len(d.worker("d0").cancels) >= 2  # the leases of the failed attempts


async def test_a_prefill_worker_that_dies_before_the_first_token_is_replaced() -> None:
    async with deployment(prefill=2) as d:
        asking, dying, _ = await hung_prefill(d, ask_for(PROMPT))
        await dying.die()
        assert_whole(await asking, PROMPT)


async def test_a_failed_handoff_is_repeated_with_the_first_token_in_the_prompt() -> None:
    async with deployment() as d:
        d.worker("p0").faults.fail_handoffs = 2
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)
        assert [m.from_index for m in answer.migrated] == [1, 2]
        assert d.worker("p0").prefilled_at == [len(PROMPT), len(PROMPT) + 1, len(PROMPT) + 2]


async def test_a_prefill_that_ends_without_a_handoff_is_repeated() -> None:
    async with deployment() as d:
        d.worker("p0").faults.end_early = 1
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)
        assert len(answer.migrated) == 1


async def test_tokens_that_overtake_the_first_one_wait_for_it() -> None:
    async with deployment() as d:
        d.worker("p0").may_send_first.clear()
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT)))
        await d.until(lambda: any(state.phase is Phase.OVERTAKEN for state in attempts(d.router)))
        d.worker("p0").may_send_first.set()
        answer = await asking
        assert_whole(answer, PROMPT)
        assert len(answer.routed) == 1


async def test_a_handoff_given_up_because_the_first_token_ended_the_request_is_no_failure() -> None:
    async with deployment(timeouts={"handoff_report_s": 10.0}) as d:
        d.worker("p0").may_send_first.clear()
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT, 1)))
        await d.until(lambda: any(state.is_over_there for state in attempts(d.router)))
        d.worker("p0").may_send_first.set()
        answer = await asking
        assert_whole(answer, PROMPT, num_tokens=1)
        assert len(answer.ids) == len(answer.routed) == 1
        assert d.worker("p0").num_prefills == 1


def dies_at(index: int, worker: ScriptedWorker) -> None:
    """The worker dies when a request has put out this many tokens on it."""

    def on_token(running: Running) -> None:
        if len(running.output) == index:
            worker.die()

    worker.on_token = on_token


async def test_a_decode_worker_that_dies_mid_stream_is_continued_elsewhere() -> None:
    async with deployment(decode=2) as d:
        for worker in ("d0", "d1"):
            dies_at(5, d.worker(worker))
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)
        assert len(answer.routed) == 2
        assert answer.routed[0].decode_worker != answer.routed[1].decode_worker
        assert len(answer.migrated) == 1
        assert 1 <= answer.migrated[0].from_index <= 5


async def test_a_frozen_decode_worker_is_left_after_its_silence() -> None:
    async with deployment(decode=2, timeouts={"token_s": 0.3}) as d:
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


async def test_a_worker_that_never_answers_a_reservation_is_left() -> None:
    async with deployment(decode=2, timeouts={"reserve_s": 0.2}) as d:
        for worker in ("d0", "d1"):
            d.worker(worker).faults.hang_reservations = 1
        answer = await d.client.ask(ask_for(PROMPT))
        assert_whole(answer, PROMPT)


async def test_workers_go_on_when_the_registry_is_gone_and_comes_back_empty() -> None:
    async with deployment() as d:
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


@pytest.mark.parametrize("incarnation", [2, 0], ids=["later", "its clock set back"])
async def test_a_restarted_worker_serves_again_under_its_new_incarnation(incarnation: int) -> None:
    async with deployment() as d:
        assert_whole(await d.client.ask(ask_for(PROMPT)), PROMPT)
        await d.worker("d0").die()
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT)))
        await d.add_worker("d0", DECODE, incarnation=incarnation)
        assert_whole(await asking, PROMPT)
        entry = d.entry("d0")
        assert entry.facts.incarnation == incarnation
