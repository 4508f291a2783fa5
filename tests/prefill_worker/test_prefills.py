"""Single prefills: first token, ids, and blocks that a put may still read."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from baton.config.transfer import TransferConfig
from baton.v1 import worker_pb2
from cluster.worker.worker import Worker
from engine.request import PrefilledEvent, SampledToken, StepPlan
from engine.run.core import EngineCore
from engine.run.fake_runner import FakeRunner
from engine.wire import read_spec
from kv_transfer.lease import Lease, Receipt
from kv_transfer.transports.memory_transport import MemoryNetwork
from prefill_worker.role import PrefillRun
from tests.cluster.conftest import TIMED_ENGINE, HeldStep, Oracle, load_of, make_spec, until
from tests.decode_worker.links import paired
from tests.prefill_worker.held_puts import HeldPuts


@pytest.fixture
async def leased() -> AsyncIterator[tuple[Worker, Lease]]:
    """A prefill worker, and a lease for it to serve."""
    async with paired() as pair:
        yield pair.prefill, Lease.from_proto(await pair.router.reserve(make_spec("x"), pair.writer))


async def outcomes_of(run: PrefillRun, seen: list[str]) -> None:
    while (outcome := await run.next()) is not None:
        seen.append(type(outcome).__name__)


@pytest.mark.parametrize("at_once", [False, True], ids=["step by step", "all at once"])
async def test_a_first_token_is_reported_before_the_end_of_its_handoff_takes_the_worker(
    leased: tuple[Worker, Lease], monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    prefill, lease = leased
    seen: list[str] = []
    finish = prefill.rank.transfer.finish

    def record_and_finish(*arguments: object) -> None:
        seen.append("the handoff is finished")
        finish(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(prefill.rank.transfer, "finish", record_and_finish)
    may_compute, computed = threading.Event(), threading.Event()
    if at_once:
        prefill.engine.post(lambda engine: may_compute.wait(10))
    run = prefill.prefill.start(read_spec(make_spec("x")), lease, None)
    following = asyncio.create_task(outcomes_of(run, seen))
    if at_once:
        for _ in range(10):  # turns of the loop: all wait for the engine by then
            await asyncio.sleep(0)
        may_compute.set()
        while not computed.wait(0.01):  # the loop is busy meanwhile
            prefill.engine.post(lambda engine: None if engine.has_work() else computed.set())
    await following
    assert seen == [PrefilledEvent.__name__, "the handoff is finished", Receipt.__name__]


async def test_a_lease_and_its_prompt_are_taken_in_one_step(
    leased: tuple[Worker, Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step for the lease alone would be one that the prompt waits for."""
    prefill, lease = leased
    plans: list[StepPlan] = []
    assert isinstance(prefill.rank.engine, EngineCore)
    runner = prefill.rank.engine._runner
    assert isinstance(runner, FakeRunner)
    run_plan = runner.run

    def record_and_run(plan: StepPlan, *given: Any) -> Sequence[SampledToken]:
        plans.append(plan)
        return run_plan(plan, *given)

    monkeypatch.setattr(runner, "run", record_and_run)
    await until(lambda: not prefill.engine.runnable)
    run = prefill.prefill.start(read_spec(make_spec("x")), lease, None)
    await asyncio.wait_for(outcomes_of(run, []), 10)
    assert plans[0].sink_messages
    assert plans[0].seqs


async def test_an_id_that_comes_again_within_a_step_gets_its_own_tokens() -> None:
    async with paired({"engine": TIMED_ENGINE}) as pair:
        prefill, link, router, writer = pair.prefill, pair.link, pair.router, pair.writer
        prompts = [make_spec("former", 60), make_spec("latter", 60)]
        leases = [await router.reserve(spec, writer) for spec in prompts]
        former, latter = prompts
        expected = Oracle().tokens(latter)
        assert Oracle().tokens(former)[0] != expected[0]
        former.request_id = latter.request_id = "x"

        step = HeldStep(prefill)
        call = await router.prefill.prefill(worker_pb2.PrefillRequest(spec=former, lease=leases[0]))
        await asyncio.to_thread(step.begun.wait, 10)
        call.cancel()
        role = prefill.prefill
        await until(lambda: role.is_idle)
        again = asyncio.create_task(router.hand_off(latter, leases[1]))
        await until(lambda: not role.is_idle)
        step.go_on.set()
        responses = await again
        assert [r.WhichOneof("event") for r in responses] == ["first_token", "handoff_done"]
        heard = link.of("latter")
        await link.until(lambda: heard.finished)
        heard.tokens[0] = responses[0].first_token.id
        assert heard.in_order() == expected


async def test_a_client_that_leaves_while_its_prompt_is_computed_is_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "prefill_worker")
    async with paired({"engine": TIMED_ENGINE}) as pair:
        spec = make_spec("x", 60)
        lease = await pair.router.reserve(spec, pair.writer)
        step = HeldStep(pair.prefill)
        handing_off = asyncio.create_task(pair.router.hand_off(spec, lease))
        await asyncio.to_thread(step.begun.wait, 10)
        await pair.link.cancel("x")
        await until(lambda: "FENCED" in caplog.text)
        step.go_on.set()
        assert (await handing_off)[-1].handoff_failed.reason == "FENCED"
    levels = {each.levelno for each in caplog.records if each.name == "prefill_worker.role"}
    assert levels == {logging.INFO}


async def test_blocks_that_a_put_may_still_read_are_not_free_until_it_has_drained(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    puts = HeldPuts()
    impatient = TransferConfig(transport="memory", ack_timeout_s=0.5)
    monkeypatch.setattr(MemoryNetwork, "_shared", MemoryNetwork(puts))
    async with paired({"transfer": impatient}) as pair:
        prefill, link, router = pair.prefill, pair.link, pair.router
        spec = make_spec("stuck", 60)
        lease = await router.reserve(spec, pair.writer)
        handing_off = asyncio.create_task(router.hand_off(spec, lease))
        await until(lambda: puts.held)
        await link.cancel("stuck")
        await until(lambda: "not every rank has drained" in caplog.text)
        assert (await handing_off)[-1].handoff_failed.reason == "FENCED"
        puts.holds = False
        # Another prompt comes and goes: whatever was to be let go of has been.
        other = make_spec("other", 7)
        other.sampling.max_tokens = 1
        responses = await router.hand_off(other, await router.reserve(other, pair.writer))
        assert responses[-1].first_token.finished
        load = await load_of(prefill)
        assert load.num_blocks - load.num_free_blocks >= 7
        assert not prefill.prefill.is_idle
        puts.go_on()
        await link.cancel("other")
        role = prefill.prefill
        await until(lambda: role.is_idle)
