"""A worker has warmed up before anybody hears of it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from baton.config.cluster import parse_config
from baton.config.transfer import TransferConfig
from baton.fleet import Role
from baton.v1 import worker_pb2
from cluster.worker.config import RankPosition, WorkerConfig, worker_config
from cluster.worker.process import serve_worker
from cluster.worker.rank import build_rank
from cluster.worker.reports import Registrar
from cluster.worker.worker import EngineStuckError, Worker
from engine.request import StepPlan
from engine.run.fake_runner import FakeRunner
from tests.cluster.conftest import TIMED_ENGINE

Steps = list[list[int]]
"""Tokens of each sequence, step by step."""


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Steps:
    steps: Steps = []
    run = FakeRunner.run

    def remember(self: FakeRunner, plan: StepPlan, *given: Any) -> Any:
        steps.append([len(seq.token_ids) for seq in plan.seqs])
        return run(self, plan, *given)

    monkeypatch.setattr(FakeRunner, "run", remember)
    return steps


@pytest.mark.parametrize("role", Role)
async def test_a_worker_of_any_role_registers_once_its_engine_has_prefilled_and_decoded(
    kit: Any, role: Role, ran: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran_before: Steps = []

    class Registers(Registrar):
        async def run(self) -> None:
            ran_before.extend(ran)
            await super().run()

    monkeypatch.setattr("cluster.worker.worker.Registrar", Registers)
    async with kit.running_worker("any-0", role, TIMED_ENGINE) as worker:
        await asyncio.wait_for(worker.ready.wait(), 10)
        assert [64] in ran_before
        assert [1] in ran_before
        assert ran == ran_before
        await kit.nothing_held(worker)
        books = await worker.integrity()
        assert books == worker_pb2.CheckIntegrityResponse()
        load = await kit.load_of(worker)
        assert (load.prefill_tokens_per_s, load.decode_step_s) == (0.0, 0.0)
        assert worker.engine.num_steps == 0
        assert worker.feed.blocks.chains() == []


async def test_a_worker_whose_warm_up_fails_ends_with_its_error_and_is_never_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(self: FakeRunner, plan: StepPlan, *given: Any) -> Any:
        raise OSError("the device is gone")

    monkeypatch.setattr(FakeRunner, "run", fails)
    made: list[Worker] = []
    fatal: list[BaseException] = []
    with pytest.raises(OSError, match="the device is gone"):
        await serve_worker(small_config(), RankPosition(), made.append, fatal.append)
    assert ([worker.ready.is_set() for worker in made], fatal) == ([False], [])


def small_config(leave_timeout_s: float = 10.0) -> WorkerConfig:
    cluster = parse_config({"model": "fake", "engine": {"backend": "fake"}})
    config = worker_config(cluster, "decode", "decode-0", "127.0.0.1:1")
    settings = replace(config.settings, leave_timeout_s=leave_timeout_s)
    return replace(config, transfer=TransferConfig(transport="memory"), settings=settings)


@dataclass
class FirstStep:
    """Does not end until `go_on`."""

    begun: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def first_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[FirstStep]:
    step, run = FirstStep(), FakeRunner.run

    def hold(self: FakeRunner, plan: StepPlan, *given: Any) -> Any:
        step.begun.set()
        assert step.go_on.wait(30)
        return run(self, plan, *given)

    monkeypatch.setattr(FakeRunner, "run", hold)
    yield step
    step.go_on.set()


@contextlib.asynccontextmanager
async def warming_up(
    first_step: FirstStep, config: WorkerConfig
) -> AsyncIterator[tuple[Worker, asyncio.Task[None]]]:
    """A worker in its first step, and what it ends with."""
    rank = await asyncio.to_thread(build_rank, config, RankPosition())
    worker = Worker(config, rank)
    serving = asyncio.create_task(worker.serve())
    try:
        assert await asyncio.to_thread(first_step.begun.wait, 10)
        yield worker, serving
    finally:
        first_step.go_on.set()
        worker.stop()
        await asyncio.wait({serving})
        await asyncio.to_thread(worker.engine.stop)
        await asyncio.to_thread(rank.close)


ENDS: dict[str, Callable[[Worker], None]] = {
    "stop": Worker.stop,
    "drain": Worker.drain,
    "fail": lambda worker: worker.fail("the transport", OSError("the device is gone")),
}


@pytest.mark.parametrize("end", ENDS)
async def test_a_worker_whose_first_step_hangs_can_be_ended(
    first_step: FirstStep, end: str
) -> None:
    async with warming_up(first_step, small_config(leave_timeout_s=0.1)) as (worker, serving):
        ENDS[end](worker)
        with pytest.raises(EngineStuckError) as stuck:
            await asyncio.wait_for(asyncio.shield(serving), 5)
        assert (stuck.value.__cause__ is not None) == (end == "fail")
        assert worker.left.is_set()


@pytest.mark.parametrize("end", ["stop", "drain"])
async def test_a_worker_that_is_to_end_while_it_warms_up_serves_nobody_first(
    first_step: FirstStep, end: str
) -> None:
    async with warming_up(first_step, small_config()) as (worker, serving):
        ENDS[end](worker)
        first_step.go_on.set()
        await asyncio.wait_for(asyncio.shield(serving), 5)
        assert (worker.address, worker.ready.is_set()) == ("", False)


PROCESS = """
import time
from baton.config.cluster import parse_config
from cluster.worker.config import RankPosition, worker_config
from cluster.worker.process import WorkerThread
from engine.run.fake_runner import FakeRunner

run, serves = FakeRunner.run, []

def look(self, plan, *given):
    serves.append(thread.serves)
    return run(self, plan, *given)

FakeRunner.run = look
cluster = parse_config({"model": "fake", "engine": {"backend": "fake"}})
thread = WorkerThread(worker_config(cluster, "decode", "decode-0", "127.0.0.1:1"), RankPosition())
thread.start()
while not thread.serves:
    time.sleep(0.01)
print(set(serves), flush=True)
thread.stop()
time.sleep(30)
"""


async def test_a_rank_that_warms_up_has_the_time_of_one_that_loads() -> None:
    """To register again after a supervisor's restart it would have less."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROCESS, stdout=asyncio.subprocess.PIPE
    )
    reported, _ = await asyncio.wait_for(process.communicate(), 60)
    assert reported == b"{False}\n"
