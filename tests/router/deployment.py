"""A registry, scripted workers and routers on loopback, and a client's view of a stream."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from baton.clock import Clock
from baton.config.router import RouterConfig
from baton.config.settings import changed
from baton.grpc_options import accepts_pings
from baton.model_folder import find_text_files
from baton.v1 import (
    common_pb2,
    control_pb2,
    control_pb2_grpc,
    router_pb2,
)
from cluster.registry.control_access import control_server, listen_at
from router.door.server import RouterServer
from router.fleet.fleet import WorkerEntry
from router.fleet.registry import RegistryAccess
from router.request.attempt import Attempt
from router.request.machine import State
from router.text import TextModel
from router.units.router import Router
from router.units.units import UNITS_EVERY_S, Units
from tests.identities import OPERATOR, ROUTER
from tests.router.answers import Answer, Client
from tests.router.fleets import entry_of
from tests.router.scripted_worker import MODEL, Fabric, ScriptedWorker

Context = grpc.aio.ServicerContext[Any, Any]
PREFILL, DECODE, MIXED = (
    common_pb2.WORKER_ROLE_PREFILL,
    common_pb2.WORKER_ROLE_DECODE,
    common_pb2.WORKER_ROLE_MIXED,
)
EOS, ALIAS = 256, "alias"
QUICK = changed(
    RouterConfig(),
    http={"port": None},
    links={"keepalive_s": 0.3, "reconnect_min_s": 0.02, "reconnect_max_s": 0.1},
    retries={"backoff_s": 0.01, "eject_s": 0.2},
    admission={"fleet_wait_s": 2.0},
    clients={"resume_window_s": 0.3},
    timeouts={"attach_s": 1.0},
    placement={"local_prefill": "never"},
)


@functools.cache
def byte_files(shift: int = 0) -> dict[str, bytes]:
    """Of a model whose tokens are the bytes of the text, plus `shift`; 256 ends a text."""
    vocab = {char: (byte + shift) % 256 for byte, char in enumerate(_byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    config = {
        "vocab_size": 257,
        "eos_token_id": EOS,
        "max_position_embeddings": 512,
        "model_type": "llama",
    }
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "config.json": json.dumps(config).encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "<end>"}).encode(),
    }


def byte_model(folder: Path, shift: int = 0) -> TextModel:
    folder.mkdir(exist_ok=True)
    for name, data in byte_files(shift).items():
        (folder / name).write_bytes(data)
    return TextModel(find_text_files(folder))


def _byte_alphabet() -> list[str]:
    """The printable stand-in of every byte in byte-level BPE."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_in = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in stand_in)
    stand_in.update({byte: chr(256 + n) for n, byte in enumerate(others)})
    return [stand_in[byte] for byte in range(256)]


@functools.cache
def default_model() -> TextModel:
    with tempfile.TemporaryDirectory() as folder:
        return byte_model(Path(folder))


def reading(
    registry: Registry, text_model: TextModel | None = None
) -> Callable[[RegistryAccess], Awaitable[tuple[TextModel, bytes]]]:
    """What a door gets that need not ask a worker."""

    async def read(access: RegistryAccess) -> tuple[TextModel, bytes]:
        return text_model or default_model(), registry.model_fingerprint

    return read


class Registry(control_pb2_grpc.ControlServiceServicer):
    """Tells its watchers of the workers it is given."""

    def __init__(self) -> None:
        self.workers: list[ScriptedWorker] = []
        self.pools: list[control_pb2.PoolStatus] = []
        self.settles = False
        self.model_fingerprint = b""
        self._changed = asyncio.Condition()
        self._version = 0
        self._server: grpc.aio.Server | None = None
        self.address = ""
        self.last_report = control_pb2.ReportRouterRequest()

    async def start(self, port: int = 0) -> None:
        options = (("grpc.so_reuseport", 0), *accepts_pings(min_interval_s=0.01))
        server = self._server = control_server(OPERATOR, options)
        control_pb2_grpc.add_ControlServiceServicer_to_server(self, server)
        self.address = f"127.0.0.1:{listen_at(server, f'127.0.0.1:{port}', OPERATOR)}"
        await server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)

    async def publish(self) -> None:
        async with self._changed:
            self._version += 1
            self._changed.notify_all()

    async def WatchUnits(  # noqa: N802
        self, request: control_pb2.WatchUnitsRequest, context: Context
    ) -> AsyncIterator[control_pb2.WatchUnitsResponse]:
        """Itself alone, as a registry that nobody set any units at."""
        while True:
            yield control_pb2.WatchUnitsResponse(units=[control_pb2.Unit(share=1.0)])
            await asyncio.sleep(UNITS_EVERY_S)

    async def ReportRouter(  # noqa: N802
        self,
        request_iterator: AsyncIterator[control_pb2.ReportRouterRequest],
        context: Context,
    ) -> control_pb2.ReportRouterResponse:
        async for self.last_report in request_iterator:
            continue
        return control_pb2.ReportRouterResponse()

    async def WatchFleet(  # noqa: N802
        self, request: control_pb2.WatchFleetRequest, context: Context
    ) -> AsyncIterator[control_pb2.WatchFleetResponse]:
        while True:
            version = self._version
            yield control_pb2.WatchFleetResponse(
                version=version,
                workers=[worker.info() for worker in self.workers],
                pools=self.pools,
                settles=self.settles,
                model_fingerprint=self.model_fingerprint,
            )
            async with self._changed:
                try:
                    async with asyncio.timeout(0.5):
                        await self._changed.wait_for(lambda seen=version: self._version != seen)
                except TimeoutError:
                    continue


def attempts(router: Router) -> list[State]:
    """The states of the attempts that are under way."""
    return [run.stage.state for run in router.runs if isinstance(run.stage, Attempt)]


class Deployment:
    """Own the processes-to-be of one test: all in one event loop, all over real sockets."""

    def __init__(
        self, config: RouterConfig, clock: Clock | None, text_model: TextModel | None
    ) -> None:
        self.text_model, self.config, self.clock = text_model, config, clock
        self.router_identity = ROUTER
        self.fabric, self.registry = Fabric(), Registry()
        self.servers: list[RouterServer] = []
        self.clients: list[Client] = []
        self.all_workers: list[ScriptedWorker] = []

    @property
    def router(self) -> Router:
        return self.routers[0]

    @property
    def routers(self) -> list[Router]:
        """Of the one unit, at each of the doors."""
        return [server.units.routers[0] for server in self.servers]

    @property
    def client(self) -> Client:
        return self.clients[0]

    def worker(self, worker_id: str) -> ScriptedWorker:
        return self.fabric.workers[worker_id]

    async def add_worker(
        self, worker_id: str, role: int, incarnation: int = 1, **shape: int | str | bytes
    ) -> ScriptedWorker:
        """`shape`: what the worker registers of its KV memory, its pool and its model."""
        worker = await ScriptedWorker(worker_id, role, self.fabric, incarnation).start()
        vars(worker).update(shape)
        worker.kv.text_files = byte_files()
        known = [w for w in self.registry.workers if w.worker_id != worker_id]
        self.registry.workers = [*known, worker]
        self.all_workers.append(worker)
        await self.registry.publish()
        return worker

    async def add_router(self, is_awaited: bool = True, **changes: Any) -> Client:
        config = changed(self.config, **changes)
        units = Units(
            config,
            self.registry.address,
            (MODEL, ALIAS),
            self.router_identity,
            read=reading(self.registry, self.text_model),
            clock=self.clock,
            rng=random.Random(1),
        )
        server = RouterServer(units, config, "127.0.0.1:0")
        await server.start()
        if is_awaited:
            await units.main_router()
        self.servers.append(server)
        self.clients.append(Client(server.address))
        return self.clients[-1]

    def entry(self, worker_id: str) -> WorkerEntry:
        return entry_of(self.router.fleet, worker_id)

    async def until(self, condition: Callable[[], bool], what: str = "") -> None:
        """Wait for something that must come; the limit is the failure, not the measure."""
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110  whatever it is, it has no event
                await asyncio.sleep(0.005)

    async def connected(self, num_workers: int, router: Router | None = None) -> None:
        fleet = (router or self.router).fleet
        await self.until(lambda: sum(entry.usable for entry in fleet) >= num_workers)

    async def close(self) -> None:
        for client in self.clients:
            await client.channel.close()
        for server in self.servers:
            await server.stop(0.0)
        for worker in self.all_workers:
            await worker.stop()
        await self.registry.stop()

    async def check_empty(self) -> None:
        """Nothing is left of any request, in the router or on a worker."""
        router = self.router
        searching = router.parts.searching
        await self.until(lambda: router.num_active == 0 and not searching.num_requests)
        router.check_integrity()
        assert router.fleet.num_bookings == 0
        assert len(router.admission) == 0
        assert sum(link.session.num_attempts for link in router.links) == 0
        assert sum(len(link.waiting) for link in router.links) == 0
        for worker in list(self.fabric.workers.values()):
            await self.until(lambda w=worker: not w.runs and not w.num_prefilling)


@asynccontextmanager
async def deployment(
    prefill: int = 1,
    decode: int = 1,
    mixed: int = 0,
    text_model: TextModel | None = None,
    clock: Clock | None = None,
    is_emptied: bool = True,
    **changes: Any,
) -> AsyncIterator[Deployment]:
    """Workers p0.., d0.., m0.. and one router that is connected to all of them.

    At the end nothing may be left of any request, unless the test says so: `is_emptied`.
    """
    made = Deployment(changed(QUICK, **changes), clock, text_model)
    try:
        await made.registry.start()
        for letter, role, count in (("p", PREFILL, prefill), ("d", DECODE, decode)):
            for number in range(count):
                await made.add_worker(f"{letter}{number}", role)
        for number in range(mixed):
            await made.add_worker(f"m{number}", MIXED)
        await made.add_router()
        await made.connected(prefill + decode + mixed)
        yield made
        if is_emptied:
            await made.check_empty()
    finally:
        await made.close()


async def left_behind(
    d: Deployment, router: int, worker_id: str, request: router_pb2.GenerateRequest
) -> None:
    """Have a request run on a worker, and its router gone."""
    client, running = d.clients[router], d.worker(worker_id).runs
    d.worker(worker_id).may_decode.clear()
    for entry in d.routers[router].fleet:
        if entry.facts.can_decode and entry.facts.worker_id != worker_id:
            d.routers[router].fleet.hold(entry, 60.0)
    asking = asyncio.create_task(client.ask(request))
    await d.until(lambda: any(run.task is not None for run in running.values()))
    await d.servers[router].stop(0.0)
    with pytest.raises(grpc.aio.AioRpcError):
        await asking


async def hung_prefill(
    d: Deployment, request: router_pb2.GenerateRequest
) -> tuple[asyncio.Task[Answer], ScriptedWorker, ScriptedWorker]:
    """A request's answer, the worker of two that holds its prompt until it `may_prefill`, and the
    other one."""
    workers = [d.worker("p0"), d.worker("p1")]
    for worker in workers:
        worker.may_prefill.clear()
    asking = asyncio.create_task(d.client.ask(request))
    await d.until(lambda: sum(worker.num_prefilling for worker in workers) == 1)
    asked, other = sorted(workers, key=lambda worker: not worker.num_prefilling)
    other.may_prefill.set()
    return asking, asked, other


def held(d: Deployment) -> set[str]:
    """Workers that get nothing now: they were ejected."""
    now, holds = d.router.clock.now_s(), d.router.fleet.arrays.hold_until_s
    return {entry.facts.worker_id for entry in d.router.fleet if holds[entry.slot] > now}
