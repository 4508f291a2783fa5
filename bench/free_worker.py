"""Workers that answer at once and compute nothing, and a registry that knows them.

A request's seed is its step in milliseconds: so long after a token comes the next one.

python -m bench.free_worker prints the addresses of the registry, a prefill and a decode worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import uvloop

from baton.link.frames import Method
from baton.link.worker_end import CallContext, Served, streams
from baton.v1 import common_pb2, control_pb2, worker_pb2
from tests.link_stub import WorkerPort
from tests.router.deployment import Registry, byte_files
from tests.router.scripted_worker import BLOCK_SIZE, FINGERPRINT, MODEL

IDLE_STEP_S = 0.01
EARLY = 0.2  # of a step
MAX_UNREAD = 4  # steps; a router that is behind gets no more of them
PREFILL, DECODE = common_pb2.WORKER_ROLE_PREFILL, common_pb2.WORKER_ROLE_DECODE
LETTERS = list(range(97, 123))


async def until_next_step(step_s: float) -> None:
    """All requests of one step are woken together. A timer that fires a little early, as uvloop's
    do, is in the step that it was set for."""
    now_s = time.monotonic()
    await asyncio.sleep((now_s / step_s + EARLY) // 1 * step_s + step_s - now_s)


@dataclass
class Stream:
    """One request on a decode worker."""

    spec: worker_pb2.RequestSpec
    num_sent: int = 0  # 0: not admitted yet


@dataclass
class Session:
    """One router's requests on a decode worker. It sends one message a step, with a token for each
    of them."""

    worker_id: str
    streams: dict[str, Stream] = field(default_factory=dict)
    outbox: asyncio.Queue[worker_pb2.SessionResponse] = field(default_factory=asyncio.Queue)
    step_s: float = IDLE_STEP_S

    async def read(self, requests: AsyncIterator[worker_pb2.SessionRequest]) -> None:
        async for request in requests:
            if request.HasField("reserve"):
                self._reserve(request.reserve)
            elif request.HasField("cancel"):
                self.streams.pop(request.cancel.request_id, None)

    def _reserve(self, reserve: worker_pb2.Reserve) -> None:
        spec = reserve.spec
        self.streams[spec.request_id] = Stream(spec)
        self.step_s = spec.seed / 1e3
        owner = common_pb2.WorkerRef(worker_id=self.worker_id, incarnation=1)
        lease = worker_pb2.Lease(lease_id="l", owner=owner, writer=reserve.writer)
        reserved = worker_pb2.Reserved(
            request_id=spec.request_id, attempt=spec.attempt, lease=lease
        )
        self.outbox.put_nowait(worker_pb2.SessionResponse(reserved=[reserved]))

    async def steps(self) -> None:
        while True:
            await until_next_step(self.step_s if self.streams else IDLE_STEP_S)
            if self.outbox.qsize() >= MAX_UNREAD:
                continue
            tokens = [self._next(s) for s in list(self.streams.values()) if s.num_sent]
            if tokens:
                self.outbox.put_nowait(worker_pb2.SessionResponse(tokens=tokens))

    def _next(self, stream: Stream) -> worker_pb2.RequestTokens:
        spec, index = stream.spec, stream.num_sent
        stream.num_sent += 1
        tokens = worker_pb2.RequestTokens(
            request_id=spec.request_id,
            attempt=spec.attempt,
            index=index,
            ids=[LETTERS[index % len(LETTERS)]],
        )
        if stream.num_sent >= spec.sampling.max_tokens:
            tokens.finished = common_pb2.FINISH_REASON_LENGTH
            del self.streams[spec.request_id]
        return tokens


class FreeWorker:
    """A worker of one role that has no model."""

    def __init__(self, worker_id: str, role: int, peers: dict[str, FreeWorker]) -> None:
        self.worker_id, self.role, self.peers = worker_id, role, peers
        self.address = ""
        self._sessions: list[Session] = []
        methods = {
            Method.FOLLOW_KV: streams(self.follow),
            Method.PREFILL: streams(self.prefill),
            Method.SESSION: Served(self.session),
            Method.READ_TOKENIZER: streams(self.read_tokenizer),
        }
        self._port = WorkerPort(methods, name=f"{worker_id}/1")
        peers[worker_id] = self

    async def start(self) -> None:
        self.address = await self._port.start()

    def info(self) -> control_pb2.FleetWorker:
        info = control_pb2.WorkerInfo(
            ref=common_pb2.WorkerRef(worker_id=self.worker_id, incarnation=1),
            role=self.role,  # type: ignore[arg-type]
            address=self.address,
            model=MODEL,
            kv_fingerprint=FINGERPRINT,
            block_size=BLOCK_SIZE,
            num_blocks=1_000_000,
            max_model_len=1 << 17,
            max_num_seqs=4096,
            vocab_size=257,
            kv_bytes_per_token=1 << 10,
        )
        load = worker_pb2.WorkerLoad(prefill_tokens_per_s=1e6, decode_step_s=IDLE_STEP_S)
        return control_pb2.FleetWorker(info=info, state=control_pb2.WORKER_STATE_LIVE, load=load)

    async def follow(
        self, request: worker_pb2.SubscribeKvRequest, context: CallContext
    ) -> AsyncIterator[worker_pb2.SubscribeKvResponse]:
        yield worker_pb2.SubscribeKvResponse(incarnation=1, sequence=1, snapshot=True)
        await asyncio.Event().wait()

    async def read_tokenizer(
        self, request: worker_pb2.ReadTokenizerRequest, context: CallContext
    ) -> AsyncIterator[worker_pb2.ReadTokenizerResponse]:
        for name, data in byte_files().items():
            yield worker_pb2.ReadTokenizerResponse(name=name, data=data)

    async def prefill(
        self, request: worker_pb2.PrefillRequest, context: CallContext
    ) -> AsyncIterator[worker_pb2.PrefillResponse]:
        first = worker_pb2.FirstToken(id=LETTERS[0], prefill_ms=0.01)
        yield worker_pb2.PrefillResponse(first_token=first)
        for session in self.peers[request.lease.owner.worker_id]._sessions:
            if stream := session.streams.get(request.spec.request_id):
                stream.num_sent = 1
        yield worker_pb2.PrefillResponse(handoff_done=worker_pb2.HandoffDone(num_blocks=1))

    async def session(
        self, requests: AsyncIterator[worker_pb2.SessionRequest], context: CallContext
    ) -> AsyncIterator[worker_pb2.SessionResponse]:
        session = Session(self.worker_id)
        self._sessions.append(session)
        work = [asyncio.create_task(w) for w in (session.read(requests), session.steps())]
        try:
            while True:
                yield await session.outbox.get()
        finally:
            self._sessions.remove(session)
            for task in work:
                task.cancel()


async def serve_workers() -> None:
    """Serve a registry, two prefill and two decode workers until the process is ended."""
    peers: dict[str, FreeWorker] = {}
    for name, role in (("p0", PREFILL), ("p1", PREFILL), ("d0", DECODE), ("d1", DECODE)):
        await FreeWorker(name, role, peers).start()
    registry = Registry()  # type: ignore[abstract]
    registry.workers = list(peers.values())  # type: ignore[arg-type]
    await registry.start()
    print(registry.address, peers["p0"].address, peers["d0"].address, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve_workers())
