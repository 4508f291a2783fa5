"""Sessions lost while their worker lives, and workers the registry has its doubts about."""

from __future__ import annotations

import asyncio
import math
import random
import time
from pathlib import Path

import pytest

from baton.clock import ManualClock
from baton.fleet import WorkerState
from baton.identity.keys import ROLES
from baton.link.router_end import Link
from baton.v1 import common_pb2, control_pb2, worker_pb2
from baton.wire import ORPHANED
from router.fleet.session import Report, RouterIdentity, Session, SessionLostError
from router.request.alarm import Alarm
from router.request.attempt import Attempt
from tests.certificates import Authority, certified
from tests.identities import ROUTER
from tests.router.answers import PROMPT, Answer, ask_for, assert_whole, failures_of
from tests.router.deployment import DECODE, Deployment, deployment, hung_prefill
from tests.router.fleets import entry_of, facts, fleet_of
from tests.router.proxy import Proxy
from tests.router.scripted_tokens import Running
from tests.router.scripted_worker import ScriptedWorker


def assert_attached_again(answer: Answer, worker: ScriptedWorker, num_tokens: int) -> None:
    """The same attempt went on: nothing was prefilled, reserved or decoded twice."""
    assert_whole(answer, PROMPT, num_tokens)
    assert len(answer.routed) == 1
    assert not answer.migrated
    assert worker.num_attaches == 1
    assert worker.num_reserves == 1
    assert worker.num_decode_steps == num_tokens - 1  # the first token is the prefill worker's
    assert not worker.cancels


async def test_a_session_closed_plainly_is_opened_again_and_its_requests_go_on() -> None:
    async with deployment() as d:
        worker = d.worker("d0")
        worker.on_token = lambda running: (
            worker.drop_sessions() if len(running.output) == 4 else None
        )
        answer = await d.client.ask(ask_for(PROMPT, 60))
        assert_attached_again(answer, worker, 60)
        assert d.worker("p0").num_prefills == 1


async def test_a_request_that_ended_while_its_session_was_lost_is_read_to_its_end() -> None:
    async with deployment() as d:
        worker = d.worker("d0")
        worker.step_s = 0.0  # it is done long before the router is back

        def on_token(running: Running) -> None:
            if len(running.output) == 4:
                worker.drop_sessions()

        worker.on_token = on_token
        assert_attached_again(await d.client.ask(ask_for(PROMPT, 30)), worker, 30)


async def test_a_cut_connection_loses_no_token_and_no_step() -> None:
    async with deployment(decode=0) as d:
        proxy = await behind_proxy(d, "d0")
        worker = d.worker("d0")
        worker.on_token = lambda running: proxy.cut() if len(running.output) == 5 else None
        answer = await d.client.ask(ask_for(PROMPT, 60))
        assert_attached_again(answer, worker, 60)
        await d.check_empty()
        await d.router.close()
        await proxy.close()


async def behind_proxy(d: Deployment, worker_id: str) -> Proxy:
    """A decode worker that the router reaches through a proxy."""
    worker = await ScriptedWorker(worker_id, DECODE, d.fabric).start()
    proxy = await Proxy.to(worker.address)
    worker.address = proxy.address
    d.registry.workers.append(worker)
    d.all_workers.append(worker)
    await d.registry.publish()
    await d.connected(len(d.registry.workers))
    return proxy


async def test_a_session_lost_during_the_prefill_does_not_repeat_it() -> None:
    async with deployment() as d:
        prefill, decode = d.worker("p0"), d.worker("d0")
        prefill.may_prefill.clear()
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT)))
        await d.until(lambda: prefill.num_prefilling == 1)
        decode.drop_sessions()
        await d.until(lambda: decode.num_attaches == 1)
        prefill.may_prefill.set()
        assert_attached_again(await asking, decode, 12)
        assert prefill.num_prefills == 1


async def test_a_request_the_worker_no_longer_knows_starts_again() -> None:
    async with deployment() as d:
        worker = d.worker("d0")

        def on_token(running: Running) -> None:
            if len(running.output) == 4 and running.spec.attempt == 1:
                worker.drop_sessions()
                worker.forget_runs()

        worker.on_token = on_token
        answer = await d.client.ask(ask_for(PROMPT, 30))
        assert_whole(answer, PROMPT, 30)
        assert len(answer.routed) == 2
        assert answer.migrated[0].from_index <= 4


def ended_while_the_session_is_lost(worker: ScriptedWorker, error: str) -> None:
    """Have the worker end the first attempt that it runs, and lose the session before."""

    def on_token(running: Running) -> None:
        if len(running.output) == 4 and running.spec.attempt == 1:
            worker.drop_sessions()
            running.finished, running.error = common_pb2.FINISH_REASON_ABORTED, error

    worker.on_token = on_token


async def test_a_request_its_worker_gave_up_for_want_of_a_router_goes_on_once_that_is_back() -> (
    None
):
    async with deployment(retries={"eject_s": 30.0}) as d:
        ended_while_the_session_is_lost(d.worker("d0"), ORPHANED)
        answer = await d.client.ask(ask_for(PROMPT, 30))
        assert_whole(answer, PROMPT, 30)
        assert [routed.attempt for routed in answer.routed] == [1, 2]
        assert failures_of(d.router).keys() == {"GIVEN_UP"}
        assert not d.router.fleet.arrays.hold_until_s.any()


async def test_a_request_aborted_elsewhere_while_its_session_is_lost_is_not_begun_again() -> None:
    async with deployment() as d:
        ended_while_the_session_is_lost(d.worker("d0"), "cancelled")
        answer = await d.client.ask(ask_for(PROMPT, 30))
        assert answer.reason == common_pb2.FINISH_REASON_ABORTED
        assert d.worker("d0").num_reserves == 1


async def test_a_session_that_does_not_come_back_in_time_is_left() -> None:
    async with deployment(decode=1, timeouts={"reattach_s": 0.2}, links={"keepalive_s": 30.0}) as d:
        proxy = await behind_proxy(d, "d1")
        slow = d.worker("d1")
        d.router.fleet.hold(d.entry("d0"), 0.3)  # the request goes to d1

        def on_token(running: Running) -> None:
            if len(running.output) == 5:
                proxy.freeze()
                proxy.cut()

        slow.on_token = on_token
        answer = await d.client.ask(ask_for(PROMPT, 60))
        assert_whole(answer, PROMPT, 60)
        assert [r.decode_worker for r in answer.routed] == ["d1", "d0"]
        await slow.die()
        await d.check_empty()
        await d.router.close()
        await proxy.close()


# --- a session's own backlog and faults ----------------------------------------------------------


async def test_a_worker_that_reads_nothing_loses_its_session_and_hears_the_cancels_later() -> None:
    async with deployment() as d:
        proxy = await Proxy.to(d.worker("d0").address)
        link = await Link.connect(proxy.address, ROUTER, keepalive_s=60.0, timeout_s=5.0)
        session = Session("d0", RouterIdentity("r", 1), max_unsent_bytes=1 << 20)
        session.open(link)
        session.cancel("mine", 1)
        proxy.freeze()
        big = worker_pb2.RequestSpec(token_ids=bytes(1 << 20))

        def fill() -> None:
            for _ in range(100):  # more than the sockets' buffers hold
                session.reserve(worker_pb2.Reserve(spec=big))

        with pytest.raises(SessionLostError, match="d0 takes no messages"):
            fill()
        session.cancel("mine", 2)
        assert not session.is_open
        assert not link.is_open
        worker = d.worker("d0")
        again = await Link.connect(worker.address, ROUTER, keepalive_s=60.0, timeout_s=5.0)
        session.open(again)
        await d.until(lambda: worker.cancels[-2:] == [("mine", 1), ("mine", 2)])
        again.close("it is over")
        proxy.thaw()
        await proxy.close()


async def test_requests_run_over_links_with_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Authority(tmp_path)
    own = {role: certified(root, role) for role in ROLES}
    monkeypatch.setattr(ScriptedWorker, "identity", own["worker"])
    monkeypatch.setattr("tests.router.deployment.ROUTER", own["router"])
    monkeypatch.setattr("tests.router.deployment.OPERATOR", own["operator"])
    async with deployment() as d:
        assert_whole(await d.client.ask(ask_for(PROMPT)), PROMPT)
        d.worker("d0").drop_sessions()
        assert_whole(await d.client.ask(ask_for(PROMPT)), PROMPT)


async def test_a_fault_of_ours_in_a_session_does_not_lose_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with deployment() as d:
        faults, on_report = list[Attempt](), Attempt.on_report

        def fail_once(attempt: Attempt, report: Report) -> None:
            if not isinstance(report, worker_pb2.HandoffAdmitted):
                return on_report(attempt, report)
            monkeypatch.setattr(Attempt, "on_report", on_report)
            faults.append(attempt)
            raise AssertionError("a fault of ours")

        monkeypatch.setattr(Attempt, "on_report", fail_once)
        assert_whole(await d.client.ask(ask_for(PROMPT)), PROMPT)
        assert len(faults) == 1


# --- workers the registry calls suspect -----------------------------------------------------------


async def test_a_silent_stream_leaves_a_suspect_worker_soon() -> None:
    async with deployment(decode=2, timeouts={"suspect_silence_s": 0.2}) as d:
        assert d.router.config.timeouts.token_s >= 30
        asking = asyncio.create_task(paused(d, index=3))
        await d.until(lambda: any(not d.worker(w).may_decode.is_set() for w in ("d0", "d1")))
        stuck = "d0" if not d.worker("d0").may_decode.is_set() else "d1"
        d.worker(stuck).state = control_pb2.WORKER_STATE_SUSPECT
        began_s = time.monotonic()
        await d.registry.publish()
        answer = await asking
        assert time.monotonic() - began_s < 5.0
        assert_whole(answer, PROMPT)
        assert [r.decode_worker for r in answer.routed] == [stuck, "d1" if stuck == "d0" else "d0"]


async def paused(d: Deployment, index: int) -> Answer:
    for worker_id in ("d0", "d1"):
        worker = d.worker(worker_id)
        worker.on_token = lambda running, w=worker: (  # type: ignore[misc]
            w.may_decode.clear()
            if len(running.output) == index and running.spec.attempt == 1
            else None
        )
    return await d.client.ask(ask_for(PROMPT))


async def test_a_prompt_leaves_a_suspect_prefill_worker_soon() -> None:
    async with deployment(prefill=2, timeouts={"suspect_silence_s": 0.2}) as d:
        asking, stuck, other = await hung_prefill(d, ask_for(PROMPT))
        stuck.state = control_pb2.WORKER_STATE_SUSPECT
        await d.registry.publish()
        answer = await asking
        assert_whole(answer, PROMPT)
        assert [r.prefill_worker for r in answer.routed] == [stuck.worker_id, other.worker_id]


async def test_a_flowing_stream_stays_on_a_suspect_worker() -> None:
    async with deployment(timeouts={"suspect_silence_s": 0.4}) as d:
        worker = d.worker("d0")
        worker.step_s = 0.02
        asking = asyncio.create_task(d.client.ask(ask_for(PROMPT, 60)))  # 1.2 s at the least
        await d.until(lambda: bool(worker.runs))
        worker.state = control_pb2.WORKER_STATE_SUSPECT
        await d.registry.publish()
        answer = await asking
        assert_whole(answer, PROMPT, 60)
        assert len(answer.routed) == 1


async def test_a_worker_that_is_live_again_gets_its_full_time_back() -> None:
    clock = ManualClock(100.0)
    fleet = fleet_of(facts("d0", False, True), clock=clock)
    entry = entry_of(fleet, "d0")
    over: list[str] = []
    alarm = Alarm(math.inf, 1.5, clock, pytest.fail)
    alarm.expect("a token", lambda _: 30.0, (entry,), lambda _, what: over.append(what))
    clock.advance(10.0)
    fleet.set_state(entry, WorkerState.SUSPECT)
    alarm.review()
    clock.advance(1.4)
    assert not over  # suspect for less than the limit, though silent for long
    fleet.set_state(entry, WorkerState.LIVE)
    clock.advance(1.0)
    assert not over
    fleet.set_state(entry, WorkerState.SUSPECT)
    alarm.review()
    clock.advance(1.5)
    assert over == ["a token"]
    alarm.end()
    alarm.end()  # as after a fault while a request ends


# --- a worker that came back as another -----------------------------------------------------------


async def test_a_worker_replaced_by_one_of_another_fingerprint_costs_nobody_a_token() -> None:
    async with deployment(decode=2, retries={"max_attempts": 1}) as d:
        d.router.fleet.arrays.max_running[:] = 0
        prompts = [f"{PROMPT} {number}" for number in range(6)]
        asking = [asyncio.create_task(d.client.ask(ask_for(prompt))) for prompt in prompts]
        await d.until(lambda: len(d.router.admission) == 6)
        port = int(d.worker("d0").address.rpartition(":")[2])
        await d.worker("d0").die()
        await d.until(lambda: d.router.links.find("d0", 1) is None)
        other = ScriptedWorker("d0", DECODE, d.fabric, incarnation=2)
        other.kv_fingerprint = b"g" * 16
        d.all_workers.append(await other.start(port))  # the registry does not know of it yet
        d.router.fleet.arrays.max_running[:] = 8
        d.router.admission.kick()
        for prompt, answer in zip(prompts, await asyncio.gather(*asking)):
            assert_whole(answer, prompt)
            assert not answer.migrated
        assert other.num_reserves == 0  # it is not the one that the router means
        d.registry.workers = [w for w in d.registry.workers if w.worker_id != "d0"] + [other]
        await d.registry.publish()
        await d.until(lambda: d.router.links.find("d0", 2) is not None)
        answer = await d.client.ask(ask_for(PROMPT))
        assert answer.routed[0].decode_worker == "d1"  # no prefill worker is of the other's kind


@pytest.mark.parametrize("seed", [1])
async def test_sessions_that_keep_breaking_repeat_no_decode_step(seed: int) -> None:
    """Only sessions break here, so every token is computed exactly once."""
    async with deployment(decode=2) as d:
        rng = random.Random(seed)
        workers = [d.worker("d0"), d.worker("d1")]
        for worker in workers:
            worker.step_s = 0.004
        asking = [
            asyncio.create_task(d.client.ask(ask_for(f"{PROMPT} {n}", 60))) for n in range(12)
        ]
        await d.until(lambda: d.worker("p0").num_prefills == 12)
        await d.until(lambda: d.worker("p0").num_prefilling == 0)
        while not all(task.done() for task in asking):
            rng.choice(workers).drop_sessions()
            await asyncio.wait(asking, timeout=rng.uniform(0.02, 0.06))
        for number, task in enumerate(asking):
            assert_whole(task.result(), f"{PROMPT} {number}", 60)
        assert sum(worker.num_decode_steps for worker in workers) == 12 * 59
        assert d.worker("p0").num_prefills == 12
        assert sum(worker.num_attaches for worker in workers) >= 12
