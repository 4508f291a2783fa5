"""CheckIntegrity over gRPC, and a rank whose transfer thread dies."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest

from baton.config.transfer import TransferConfig
from baton.config.workers import WorkerSettings
from baton.fleet import Role
from baton.link.frames import MESSAGES, LinkError, Method
from baton.link.router_end import ask_once
from baton.v1 import worker_pb2
from cluster.worker.config import RankPosition
from cluster.worker.process import serve_worker
from cluster.worker.worker import EngineStuckError, Worker, WorkerFailedError
from kv_transfer.transport import FlushResult
from kv_transfer.transports.by_name import make_transport
from tests.cluster.conftest import SETTINGS, worker_config
from tests.identities import OPERATOR
from tests.link_stub import books_at


async def books_of(worker: Worker) -> worker_pb2.CheckIntegrityResponse:
    return await books_at(worker.address)


async def test_integrity_reports_what_a_handoff_holds_on_either_side_and_nothing_after_it(
    pair: Any, kit: Any
) -> None:
    spec = kit.make_spec("held")
    lease = await pair.router.reserve(spec, pair.writer)
    books = await books_of(pair.decode)
    assert (books.num_reserved, books.num_open_leases) == (1, 1)
    assert books.num_blocks_in_use > 0
    assert not books.problems
    await pair.router.hand_off(spec, lease)
    heard = pair.link.of("held")
    await pair.link.until(lambda: heard.finished)
    await kit.nothing_held(pair.prefill, pair.decode)
    for worker in (pair.prefill, pair.decode):
        books = await books_of(worker)
        assert not books.problems
        assert books.num_blocks_in_use == books.num_open_leases == books.num_open_handoffs == 0
    assert (await books_of(pair.prefill)).num_first_tokens == 1
    assert (await books_of(pair.decode)).num_later_tokens == len(heard.in_order()) - 1
    assert (await books_of(pair.decode)).num_first_tokens == 0


async def test_a_part_whose_tables_do_not_agree_is_named(pair: Any) -> None:
    role = pair.decode.decode
    # Only a bug could make the tables disagree, so the test writes into them.
    role.runs._by_request["ghost"] = None  # a request that nobody runs
    (problem,) = (await books_of(pair.decode)).problems
    assert problem.startswith("decode: ")
    del role.runs._by_request["ghost"]
    assert not (await books_of(pair.decode)).problems


async def test_the_integrity_of_a_worker_covers_the_parts_of_both_roles(pair: Any) -> None:
    # Only a bug could leave a block here, so the test writes into the table.
    written = pair.prefill.leases._writable
    written[(0, 1)] = "ghost"  # a block of a lease that nobody gave
    (problem,) = (await books_of(pair.prefill)).problems
    assert problem.startswith("leases: ")
    del written[(0, 1)]
    # Only a bug could do this, so the test writes into the table.
    pair.decode.prefill._runs["ghost"] = None
    (problem,) = (await books_of(pair.decode)).problems
    assert problem.startswith("prefill: ")
    del pair.decode.prefill._runs["ghost"]


@pytest.fixture
def fatal() -> tuple[threading.Event, list[BaseException]]:
    return threading.Event(), []


@pytest.mark.parametrize("kind", ["ucx", "memory"])
@pytest.mark.parametrize("where", ["message", "flush"])
def test_a_transfer_thread_that_fails_reports_why(
    kind: str, where: str, fatal: tuple[threading.Event, list[BaseException]]
) -> None:
    reported, errors = fatal

    def fails(*_: object) -> None:
        raise ArithmeticError("a fault in a callback")

    def on_fatal(error: BaseException) -> None:
        errors.append(error)
        reported.set()

    transport = make_transport(TransferConfig(transport=kind))
    transport.on_fatal = on_fatal
    transport.allocate(1, 1 << 16, 1)
    transport.start(fails, lambda address: None)
    itself = transport.connect(transport.address)
    if where == "message":
        transport.send(itself, b"hello")
    else:
        transport.flush(itself, fails)
    assert reported.wait(10)
    assert [str(error) for error in errors] == ["a fault in a callback"]
    transport.close()


QUICK = WorkerSettings(heartbeat_s=0.05, leave_timeout_s=0.3, metrics_port=None)


@dataclass
class Serving:
    """A worker served as its process does it."""

    worker: Worker
    left: asyncio.Task[None]
    fatal: asyncio.Future[BaseException]
    """The error for which the process must end."""


@contextlib.asynccontextmanager
async def serving(
    kit: Any, role: Role, settings: WorkerSettings = SETTINGS
) -> AsyncIterator[Serving]:
    config = worker_config(f"{role.value}-0", role, settings=settings)
    loop = asyncio.get_running_loop()
    fatal: asyncio.Future[BaseException] = loop.create_future()
    ready: asyncio.Future[Worker] = loop.create_future()

    def on_fatal(error: BaseException) -> None:
        loop.call_soon_threadsafe(fatal.set_result, error)

    left = asyncio.create_task(serve_worker(config, RankPosition(), ready.set_result, on_fatal))
    worker = await asyncio.wait_for(ready, 10)
    try:
        yield Serving(worker, left, fatal)
    finally:
        worker.stop()
        await asyncio.wait({left})


async def test_a_worker_whose_transfer_thread_fails_ends_its_process(kit: Any) -> None:
    def broken(result: FlushResult) -> None:
        raise ArithmeticError(f"{result} came at the wrong moment")

    async with serving(kit, Role.PREFILL) as served:
        transport = served.worker.rank.transport
        transport.flush(transport.connect(transport.address), broken)
        assert isinstance(await asyncio.wait_for(served.fatal, 10), ArithmeticError)


def fails(*_: object) -> None:
    raise ArithmeticError("the books do not agree")


async def test_a_worker_whose_sweep_fails_ends_with_the_error_named(kit: Any) -> None:
    async with serving(kit, Role.DECODE) as served:
        served.worker.decode.sweep = fails
        with pytest.raises(WorkerFailedError, match=r"sweep failed: ArithmeticError\('the books"):
            await asyncio.wait_for(served.left, 10)


PROCESS = """
import time
from baton.config.cluster import parse_config
from cluster.worker.config import RankPosition, worker_config
from cluster.worker.process import WorkerThread
from decode_worker.role import DecodeRole

def fails(role):
    raise ArithmeticError("the books do not agree")

DecodeRole.sweep = fails
cluster = parse_config({"model": "fake", "engine": {"backend": "fake"}})
thread = WorkerThread(worker_config(cluster, "decode", "decode-0", "127.0.0.1:1"), RankPosition())
thread.start()
print(thread.wait(30), flush=True)
time.sleep(30)
"""


async def test_the_process_of_a_worker_that_fails_reports_why_and_ends() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROCESS, stdout=asyncio.subprocess.PIPE
    )
    reported, _ = await asyncio.wait_for(process.communicate(), 60)
    assert b"WorkerFailedError: sweep failed: ArithmeticError" in reported
    assert process.returncode == 1


@pytest.mark.parametrize("part", ["decode", "feed"])
async def test_a_worker_that_cannot_take_in_a_steps_events_ends_with_the_error_named(
    kit: Any, part: str
) -> None:
    async with serving(kit, Role.DECODE) as served:
        await served.worker.ready.wait()
        getattr(served.worker, part).on_events = fails
        link = await kit.decode_link(served.worker.address, "router-a").open()
        await link.reserve(kit.make_spec("any"))
        with pytest.raises(WorkerFailedError, match=r"_dispatch.* failed: ArithmeticError\("):
            await asyncio.wait_for(served.left, 10)
        await link.close()


async def test_a_worker_whose_transfer_mail_cannot_be_booked_ends_with_the_error_named(
    kit: Any,
) -> None:
    async with serving(kit, Role.DECODE) as served:
        await served.worker.ready.wait()
        asyncio.get_running_loop().call_soon(served.worker.decode.admitted, "unheard of", None)
        with pytest.raises(WorkerFailedError, match=r"admitted.* failed: AssertionError\("):
            await asyncio.wait_for(served.left, 10)


async def test_a_worker_whose_engine_has_stopped_says_that_it_is_unavailable(kit: Any) -> None:
    async with serving(kit, Role.DECODE) as served:
        await served.worker.ready.wait()
        await asyncio.to_thread(served.worker.engine.stop)
        for method in (Method.LOAD, Method.CHECK_INTEGRITY):
            request = MESSAGES[method][0]()
            with pytest.raises(LinkError) as refused:
                await ask_once(served.worker.address, OPERATOR, method, request, 10.0)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_drain_that_finds_a_leak_ends_with_the_error_named(kit: Any) -> None:
    async with serving(kit, Role.DECODE, QUICK) as served:
        await served.worker.ready.wait()
        served.worker.decode.check_integrity = fails
        served.worker.drain()
        with pytest.raises(WorkerFailedError, match="drain failed: ArithmeticError"):
            await asyncio.wait_for(served.left, 10)


async def test_a_drain_is_not_held_up_by_an_engine_that_is_stuck(kit: Any) -> None:
    stuck = threading.Event()
    async with serving(kit, Role.DECODE, QUICK) as served:
        await served.worker.ready.wait()
        served.worker.engine.post(lambda engine: stuck.wait())
        served.worker.drain()
        error = await asyncio.wait_for(served.fatal, 10)
        assert isinstance(error, EngineStuckError)
        stuck.set()
