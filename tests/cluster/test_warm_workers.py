"""A worker has warmed up before anybody hears of it."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from typing import Any

import pytest

from baton.config import parse_config
from baton.v1 import worker_pb2
from cluster.registration import Registrar
from cluster.role_plan import Role
from cluster.worker import Worker
from cluster.worker_config import RankPlace, worker_config
from cluster.worker_process import serve_worker
from engine.fake_runner import FakeRunner
from engine.request import StepPlan
from kv_transfer.config import TransferConfig
from tests.cluster.conftest import TIMED_ENGINE

Steps = list[list[int]]
"""Tokens of each sequence, step by step."""


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Steps:
    steps: Steps = []
    run = FakeRunner.run

    def remember(self: FakeRunner, plan: StepPlan, specs: Any) -> Any:
        steps.append([len(seq.token_ids) for seq in plan.seqs])
        return run(self, plan, specs)

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

    monkeypatch.setattr("cluster.worker.Registrar", Registers)
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
        chains = worker.engine.call(lambda engine: engine.cached_chains())
        assert await asyncio.wrap_future(chains) == []


async def test_a_worker_whose_warm_up_fails_ends_with_its_error_and_is_never_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(self: FakeRunner, plan: StepPlan, specs: Any) -> Any:
        raise OSError("the device is gone")

    monkeypatch.setattr(FakeRunner, "run", fails)
    cluster = parse_config({"model": "fake", "engine": {"backend": "fake"}})
    config = worker_config(cluster, "decode", "decode-0", "127.0.0.1:1")
    config = replace(config, transfer=TransferConfig(transport="memory"))
    made: list[Worker] = []
    fatal: list[BaseException] = []
    with pytest.raises(OSError, match="the device is gone"):
        await serve_worker(config, RankPlace(), made.append, fatal.append)
    assert ([worker.ready.is_set() for worker in made], fatal) == ([False], [])


PROCESS = """
import time
from baton.config import parse_config
from cluster.worker_config import RankPlace, worker_config
from cluster.worker_process import WorkerThread
from engine.fake_runner import FakeRunner

run, serves = FakeRunner.run, []

def look(self, plan, specs):
    serves.append(thread.serves)
    return run(self, plan, specs)

FakeRunner.run = look
cluster = parse_config({"model": "fake", "engine": {"backend": "fake"}})
thread = WorkerThread(worker_config(cluster, "decode", "decode-0", "127.0.0.1:1"), RankPlace())
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
    told, _ = await asyncio.wait_for(process.communicate(), 60)
    assert told == b"{False}\n"
