"""What comes before a first token on its way, and what has to wait for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from cluster.pools.role_plan import Role
from cluster.worker.worker import Worker
from engine.fake_runner import FakeRunner
from engine.request import RequestId, RequestSpec, SampledToken, StepPlan
from engine.wire import read_spec
from kv_transfer.lease import Lease
from prefill_worker.role import FirstTokenReady, HandedOff, PrefillRun
from tests.cluster.conftest import (
    DecodeLink,
    MiniRouter,
    make_spec,
    nothing_held,
    running_worker,
    until,
)


@pytest.fixture
async def workers() -> AsyncIterator[tuple[Worker, Worker]]:
    async with (
        running_worker("prefill-0", Role.PREFILL) as prefill,
        running_worker("decode-0", Role.DECODE) as decode,
    ):
        yield prefill, decode
        await nothing_held(prefill, decode)


async def lease_of(prefill: Worker, decode: Worker, name: str) -> Lease:
    link = DecodeLink(decode.address, "router-a")
    await link.open()
    router = MiniRouter(prefill.address, link)
    lease = await router.reserve(make_spec(name), prefill.info().ref)
    await router.close()
    await link.close()
    return Lease.from_proto(lease)


async def outcomes_of(run: PrefillRun, told: list[str]) -> None:
    while (outcome := await run.next()) is not None:
        told.append(type(outcome).__name__)


@pytest.mark.parametrize("at_once", [False, True], ids=["step by step", "all at once"])
async def test_a_first_token_is_told_before_the_end_of_its_handoff_takes_the_worker(
    workers: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    prefill, decode = workers
    lease = await lease_of(prefill, decode, "x")
    told: list[str] = []
    finish = prefill.rank.transfer.finish

    def record_and_finish(*arguments: object) -> None:
        told.append("the handoff is finished")
        finish(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(prefill.rank.transfer, "finish", record_and_finish)
    may_compute, computed = threading.Event(), threading.Event()
    if at_once:
        prefill.engine.post(lambda engine: may_compute.wait(10))
    run = prefill.prefill.start(read_spec(make_spec("x")), lease, None)
    following = asyncio.create_task(outcomes_of(run, told))
    if at_once:
        for _ in range(10):  # turns of the loop: all wait for the engine by then
            await asyncio.sleep(0)
        may_compute.set()
        while not computed.wait(0.01):  # the loop is busy meanwhile
            prefill.engine.post(lambda engine: None if engine.has_work() else computed.set())
    await following
    assert told == [FirstTokenReady.__name__, "the handoff is finished", HandedOff.__name__]


async def test_a_lease_and_its_prompt_are_taken_in_one_step(
    workers: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step for the lease alone would be one that the prompt waits for."""
    prefill, decode = workers
    lease = await lease_of(prefill, decode, "x")
    plans: list[StepPlan] = []
    runner = prefill.rank.runner
    assert isinstance(runner, FakeRunner)
    run_plan = runner.run

    def record_and_run(
        plan: StepPlan, specs: dict[RequestId, RequestSpec]
    ) -> Sequence[SampledToken]:
        plans.append(plan)
        return run_plan(plan, specs)

    monkeypatch.setattr(runner, "run", record_and_run)
    await until(lambda: not prefill.engine.runnable)
    run = prefill.prefill.start(read_spec(make_spec("x")), lease, None)
    await asyncio.wait_for(outcomes_of(run, []), 10)
    assert plans[0].sink_messages
    assert plans[0].seqs
