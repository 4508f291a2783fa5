"""Workers on the fake engine, an oracle for their tokens, the smallest router that can use them."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.config.cluster import ClusterConfig, PoolConfig
from baton.config.engine import EngineConfig, FakeEngineConfig
from baton.config.transfer import TransferConfig
from baton.config.workers import WorkerSettings
from baton.fleet import Role
from baton.link.frames import LinkError
from baton.v1 import common_pb2, worker_pb2
from cluster.worker.config import RankPosition, WorkerConfig
from cluster.worker.rank import build_rank
from cluster.worker.worker import Worker
from engine.api import EngineLoad
from engine.request import RequestSpec, TokenEvent
from engine.run.build import load_lone_engine, load_model_spec
from engine.run.core import EngineCore
from engine.run.fake_runner import FakeRunner
from engine.wire import read_spec
from tests.link_stub import LinkStub

ENGINE = EngineConfig(
    backend="fake",
    block_size=8,
    num_blocks=768,
    num_regions=2,
    max_num_seqs=16,
    max_num_batched_tokens=64,
    fake=FakeEngineConfig(window=20, vocab_size=50_000),
)
TIMED_ENGINE = replace(
    ENGINE, fake=FakeEngineConfig(window=20, vocab_size=50_000, prefill_token_s=1e-6)
)
SETTINGS = WorkerSettings(heartbeat_s=0.05, metrics_port=None)
FINGERPRINT = load_model_spec("", ENGINE).kv_fingerprint


def engine_tokens(config: EngineConfig, spec: RequestSpec) -> list[int]:
    """What one engine alone, with fresh memory, says."""
    engine = load_lone_engine("", config)
    engine.add(spec)
    tokens: list[int] = []
    while engine.has_work():
        tokens += [e.token.token_id for e in engine.step() if isinstance(e, TokenEvent)]
    engine.check_integrity()
    return tokens


class Oracle:
    """The tokens of a request as a lone engine gives them."""

    def tokens(self, spec: worker_pb2.RequestSpec) -> list[int]:
        return engine_tokens(ENGINE, read_spec(spec))


def make_spec(
    request_id: str, num_prompt_tokens: int = 45, **changes: object
) -> worker_pb2.RequestSpec:
    """A request whose prompt follows from its id."""
    rng = np.random.default_rng(list(request_id.encode()))
    prompt = rng.integers(2, 50_000, num_prompt_tokens, dtype=np.uint32)
    spec = worker_pb2.RequestSpec(
        request_id=request_id,
        body_digest=b"body of " + request_id.encode(),
        tenant="tenant",
        attempt=1,
        token_ids=prompt.astype("<u4").tobytes(),
        num_prompt_tokens=num_prompt_tokens,
        sampling=common_pb2.SamplingParams(temperature=0.0, max_tokens=12),
        seed=7,
        kv_fingerprint=FINGERPRINT,
    )
    for name, value in changes.items():
        setattr(spec, name, value)
    return spec


@dataclass
class Heard:
    """What a mini router received of one attempt."""

    reserved: worker_pb2.Reserved | None = None
    rejected: worker_pb2.Rejected | None = None
    admitted: bool = False
    moved: bool = False
    tokens: dict[int, int] = field(default_factory=dict)
    finished: int = 0
    num_messages: int = 0
    repeated: list[int] = field(default_factory=list)
    """Indices of tokens that had come before."""

    def take(self, index: int, token_ids: Sequence[int]) -> None:
        new = dict(enumerate(token_ids, index))
        self.repeated += sorted(new.keys() & self.tokens.keys())
        self.tokens |= new

    def in_order(self) -> list[int]:
        assert not self.repeated, self.repeated
        assert sorted(self.tokens) == list(range(len(self.tokens))), sorted(self.tokens)
        return [self.tokens[index] for index in range(len(self.tokens))]


class DecodeLink:
    """A session with one decode worker: sends requests and keeps what it receives."""

    def __init__(self, address: str, router_id: str) -> None:
        self.stub = LinkStub(address)
        self.router_id = router_id
        self.heard: dict[tuple[str, int], Heard] = {}
        self._changed = asyncio.Condition()
        self._reader: asyncio.Task[None] | None = None

    async def open(self) -> DecodeLink:
        self._call = self.stub.session()
        await self._call.write(
            worker_pb2.SessionRequest(open=worker_pb2.OpenSession(router_id=self.router_id))
        )
        self._reader = asyncio.create_task(self._read())
        return self

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            self._call.cancel()
            # Also where the worker has ended the session.
            await asyncio.wait({self._reader})
            if not self._reader.cancelled() and (error := self._reader.exception()) is not None:
                assert isinstance(error, LinkError), error
        await self.stub.close()

    async def reserve(
        self, spec: worker_pb2.RequestSpec, writer: common_pb2.WorkerRef | None = None
    ) -> None:
        await self._call.write(
            worker_pb2.SessionRequest(reserve=worker_pb2.Reserve(spec=spec, writer=writer))
        )

    async def cancel(self, request_id: str, attempt: int = 1) -> None:
        cancel = worker_pb2.Cancel(request_id=request_id, attempt=attempt)
        await self._call.write(worker_pb2.SessionRequest(cancel=cancel))

    def of(self, request_id: str, attempt: int = 1) -> Heard:
        return self.heard.setdefault((request_id, attempt), Heard())

    async def until(self, happened: Callable[[], object], timeout_s: float = 15) -> None:
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(happened)

    async def _read(self) -> None:
        async for message in self._call:
            async with self._changed:
                for reserved in message.reserved:
                    self.of(reserved.request_id, reserved.attempt).reserved = reserved
                for rejected in message.rejected:
                    self.of(rejected.request_id, rejected.attempt).rejected = rejected
                for admitted in message.admitted:
                    self.of(admitted.request_id, admitted.attempt).admitted = True
                for moved in message.moved:
                    self.of(moved.request_id, moved.attempt).moved = True
                for run in message.tokens:
                    heard = self.of(run.request_id, run.attempt)
                    heard.take(run.index, run.ids)
                    heard.finished = run.finished or heard.finished
                    heard.num_messages += 1
                self._changed.notify_all()


class MiniRouter:
    """Runs one request at a time to its end, over a prefill and a decode worker."""

    def __init__(self, prefill_address: str, decode: DecodeLink) -> None:
        self.prefill = LinkStub(prefill_address)
        self.decode = decode

    async def close(self) -> None:
        await self.prefill.close()

    async def reserve(
        self, spec: worker_pb2.RequestSpec, writer: common_pb2.WorkerRef
    ) -> worker_pb2.Lease:
        heard = self.decode.of(spec.request_id, spec.attempt)
        await self.decode.reserve(spec, writer)
        await self.decode.until(lambda: heard.reserved or heard.rejected)
        assert heard.reserved is not None, heard.rejected
        return heard.reserved.lease

    async def hand_off(
        self, spec: worker_pb2.RequestSpec, lease: worker_pb2.Lease
    ) -> list[worker_pb2.PrefillResponse]:
        heard = self.decode.of(spec.request_id, spec.attempt)
        responses = []
        request = worker_pb2.PrefillRequest(spec=spec, lease=lease)
        async for response in await self.prefill.prefill(request):
            responses.append(response)
            if response.HasField("first_token"):
                index = len(spec.token_ids) // 4 - spec.num_prompt_tokens
                heard.take(index, [response.first_token.id])
                heard.finished = response.first_token.finished or heard.finished
        return responses

    async def generate(
        self, spec: worker_pb2.RequestSpec, writer: common_pb2.WorkerRef
    ) -> list[int]:
        heard = self.decode.of(spec.request_id, spec.attempt)
        lease = await self.reserve(spec, writer)
        responses = await self.hand_off(spec, lease)
        if not heard.finished:
            assert responses[-1].HasField("handoff_done"), responses
            await self.decode.until(lambda: heard.finished)
        return heard.in_order()


def worker_config(worker_id: str, role: Role, **changes: Any) -> WorkerConfig:
    """Of a worker on the fake engine, over the in-memory transport, without a registry."""
    mixed = PoolConfig(Role.MIXED)
    config = WorkerConfig(
        worker_id=worker_id,
        pool=role.value,
        cluster=ClusterConfig(model="fake", pools={"mixed": mixed, role.value: PoolConfig(role)}),
        engine=ENGINE,
        transfer=TransferConfig(transport="memory", renew_within_s=2.0, ack_timeout_s=2.0),
        settings=SETTINGS,
        control_address="127.0.0.1:1",  # nobody there: a worker serves without a registry
    )
    own = {name: changes.pop(name) for name in vars(config).keys() & changes.keys()}
    return replace(config, cluster=replace(config.cluster, **changes), **own)


@contextlib.asynccontextmanager
async def running_worker(
    worker_id: str,
    role: Role,
    engine: EngineConfig = ENGINE,
    **changes: Any,
) -> AsyncIterator[Worker]:
    """A worker in this process, over the in-memory transport, registered nowhere unless `changes`
    of its configuration name a `control_address`."""
    config = worker_config(worker_id, role, engine=engine, **changes)
    rank = await asyncio.to_thread(build_rank, config, RankPosition())
    worker = Worker(config, rank)
    serving = asyncio.create_task(worker.serve())
    ready = asyncio.create_task(worker.ready.wait())
    try:
        await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        yield worker
        assert not worker.problems()
        if not serving.done():
            await asyncio.wrap_future(worker.engine.call(lambda e: e.check_integrity()))
    finally:
        ready.cancel()
        worker.stop()
        await serving
        await asyncio.to_thread(rank.close)


async def load_of(worker: Worker) -> EngineLoad:
    return await asyncio.wrap_future(worker.engine.call(lambda e: e.load()))


async def nothing_held(*workers: Worker) -> None:
    """Wait until no request holds a block: fences take a message each way."""
    async with asyncio.timeout(10):
        for worker in workers:
            while True:
                load = await load_of(worker)
                if load.num_free_blocks == load.num_blocks and not load.num_quarantined_blocks:
                    break
                await asyncio.sleep(0.01)
            await asyncio.wrap_future(worker.engine.call(lambda e: e.check_integrity()))
            assert not worker.problems()


class HeldStep:
    """Holds the next step that computes something until `go_on`.

    The worker's engine has to be one whose steps take time."""

    def __init__(self, worker: Worker) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        assert isinstance(worker.rank.engine, EngineCore)
        runner = worker.rank.engine._runner
        assert isinstance(runner, FakeRunner)
        runner._sleep = self._hold  # the fake engine's only wait

    def _hold(self, _: float) -> None:
        self.begun.set()
        assert self.go_on.wait(30)


async def until(happened: Callable[[], object]) -> None:
    """Wait for what has no event of its own."""
    async with asyncio.timeout(10):
        while not happened():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@dataclass(frozen=True)
class Kit:
    """What the tests of this folder share."""

    engine = ENGINE
    engine_tokens = staticmethod(engine_tokens)
    make_spec = staticmethod(make_spec)
    running_worker = staticmethod(running_worker)
    load_of = staticmethod(load_of)
    nothing_held = staticmethod(nothing_held)
    decode_link = DecodeLink
    mini_router = MiniRouter
    oracle: Oracle = field(default_factory=Oracle)


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """An empty folder for a model."""
    (folder := tmp_path / "model").mkdir()
    return folder


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short: Ray has sockets there."""
    with tempfile.TemporaryDirectory(prefix="run-", dir="/tmp") as folder:
        yield Path(folder)


@dataclass
class Pair:
    """One prefill and one decode worker, and a router between them."""

    prefill: Worker
    decode: Worker
    link: DecodeLink
    router: MiniRouter

    @property
    def writer(self) -> common_pb2.WorkerRef:
        return self.prefill.info().ref


@pytest.fixture
async def pair(kit: Kit) -> AsyncIterator[Pair]:
    async with (
        running_worker("prefill-0", Role.PREFILL) as prefill,
        running_worker("decode-0", Role.DECODE) as decode,
    ):
        link = await DecodeLink(decode.address, "router-a").open()
        router = MiniRouter(prefill.address, link)
        yield Pair(prefill, decode, link, router)
        await router.close()
        await link.close()
