"""What any worker reports about itself, whatever its role.

`KvFeed` sends the blocks of the prefix cache to followers: a snapshot, then changes. It keeps the
snapshot itself, from the engine's events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path

import grpc

from baton.errors import ConfigError
from baton.link.frames import Method
from baton.link.worker_end import CallContext, answers, streams
from baton.v1 import worker_pb2
from engine.errors import EngineStoppedError
from engine.request import BlocksRemovedEvent, BlocksStoredEvent, EngineEvent
from kv_transfer.block_hash import HASH_BYTES, BlockHash

Chain = tuple[BlockHash | None, tuple[BlockHash, ...]]
KvMessage = worker_pb2.SubscribeKvResponse
"""`removed` applies first, then `stored`."""

PIECE_BYTES = 1 << 20  # of a file, in one message
MAX_KV_BYTES = 48 << 10  # of hashes, in one message: a multiple of a hash's


class Subscription:
    """One follower's changes. Ends when the follower is `max_pending` messages behind."""

    def __init__(self, max_pending: int) -> None:
        self._pending: asyncio.Queue[KvMessage] = asyncio.Queue(max_pending)
        self.overflowed = False

    def push(self, change: KvMessage) -> None:
        if self._pending.full():
            self.overflowed = True
        else:
            self._pending.put_nowait(change)

    async def changes(self) -> AsyncIterator[KvMessage]:
        """Yield the snapshot, then every change. Ends on overflow; then subscribe again."""
        while not self.overflowed:
            yield await self._pending.get()


class CachedBlocks:
    """The blocks of the prefix cache, each with its parent, as an engine's events tell."""

    def __init__(self) -> None:
        self._parents: dict[BlockHash, BlockHash | None] = {}  # parents first

    def apply(self, events: Iterable[EngineEvent]) -> None:
        for event in events:
            if isinstance(event, BlocksStoredEvent):
                self._parents.update(zip(event.hashes, (event.parent, *event.hashes)))
            elif isinstance(event, BlocksRemovedEvent):
                for block_hash in event.hashes:
                    del self._parents[block_hash]

    def chains(self) -> list[Chain]:
        """Return all blocks in chains, each as (parent, hashes)."""
        chains: list[tuple[BlockHash | None, list[BlockHash]]] = []
        for block_hash, parent in self._parents.items():
            if chains and chains[-1][1][-1] == parent:
                chains[-1][1].append(block_hash)
            else:
                chains.append((parent, [block_hash]))
        return [(parent, tuple(hashes)) for parent, hashes in chains]


class KvFeed:
    """Own the subscriptions. Runs on the event loop."""

    def __init__(self, incarnation: int, max_pending: int = 1024) -> None:
        """`incarnation`: the worker's."""
        self._incarnation = incarnation
        self.methods = {Method.FOLLOW_KV: streams(self._follow)}
        self.blocks = CachedBlocks()
        self._max_pending = max_pending
        self._subscriptions: set[Subscription] = set()

    async def _follow(
        self, request: worker_pb2.SubscribeKvRequest, context: CallContext
    ) -> AsyncIterator[KvMessage]:
        subscription, sequence = Subscription(self._max_pending), 0
        stored = [_stored(parent, hashes) for parent, hashes in self.blocks.chains()]
        subscription.push(KvMessage(snapshot=True, stored=stored))
        self._subscriptions.add(subscription)
        try:
            async for change in subscription.changes():
                for piece in pieces_of(change):
                    message = KvMessage(incarnation=self._incarnation, sequence=sequence)
                    message.MergeFrom(piece)  # which other followers get too
                    yield message
                    sequence += 1
        finally:
            self._subscriptions.discard(subscription)

    def on_events(self, events: Sequence[EngineEvent]) -> None:
        """Pass on one step's changes in as few messages as their order allows."""
        self.blocks.apply(events)
        if not self._subscriptions:
            return
        for change in changes_of(events):
            for subscription in list(self._subscriptions):
                subscription.push(change)
                if subscription.overflowed:
                    self._subscriptions.discard(subscription)


def changes_of(events: Iterable[EngineEvent]) -> list[KvMessage]:
    """A step's block events as messages. A removal after a store begins a new message."""
    changes: list[KvMessage] = []
    for event in events:
        if isinstance(event, BlocksRemovedEvent):
            if not changes or changes[-1].stored:
                changes.append(KvMessage())
            changes[-1].removed += b"".join(event.hashes)
        elif isinstance(event, BlocksStoredEvent):
            if not changes:
                changes.append(KvMessage())
            changes[-1].stored.append(_stored(event.parent, event.hashes))
    return changes


def pieces_of(change: KvMessage) -> list[KvMessage]:
    """The same in messages of at most about `MAX_KV_BYTES`: tokens wait for no more than one."""
    if change.ByteSize() <= MAX_KV_BYTES:
        return [change]
    pieces, num_bytes = [KvMessage(snapshot=change.snapshot)], 0
    for start in range(0, len(change.removed), MAX_KV_BYTES):
        pieces[-1].removed = change.removed[start : start + MAX_KV_BYTES]
        pieces.append(KvMessage())
    for chain in change.stored:
        parent, hashes = chain.parent_hash, chain.hashes
        for start in range(0, len(hashes), MAX_KV_BYTES):
            part = hashes[start : start + MAX_KV_BYTES]
            if num_bytes + len(part) > MAX_KV_BYTES:
                pieces.append(KvMessage())
                num_bytes = 0
            pieces[-1].stored.add(parent_hash=parent, hashes=part)
            parent, num_bytes = part[-HASH_BYTES:], num_bytes + len(part)
    return pieces


def _stored(parent: BlockHash | None, hashes: Sequence[BlockHash]) -> worker_pb2.BlockStored:
    return worker_pb2.BlockStored(parent_hash=parent or b"", hashes=b"".join(hashes))


class ReportService:
    """Answers operators. `load` asks the engine for its load, `drain` starts a drain and returns at
    once, `text_files` finds the tokenizer's files or raises ConfigError."""

    def __init__(
        self,
        load: Callable[[], Awaitable[worker_pb2.WorkerLoad]],
        drain: Callable[[float | None], None],
        integrity: Callable[[], Awaitable[worker_pb2.CheckIntegrityResponse]],
        text_files: Callable[[], Sequence[Path]],
    ) -> None:
        self._load_now, self._begin_drain = load, drain
        self._integrity, self._text_files = integrity, text_files
        self.methods = {
            Method.LOAD: answers(self._load),
            Method.DRAIN: answers(self._drain),
            Method.CHECK_INTEGRITY: answers(self._check_integrity),
            Method.READ_TOKENIZER: streams(self._read_tokenizer),
        }

    async def _load(
        self, request: worker_pb2.LoadRequest, context: CallContext
    ) -> worker_pb2.LoadResponse:
        try:
            return worker_pb2.LoadResponse(load=await self._load_now())
        except EngineStoppedError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    async def _drain(
        self, request: worker_pb2.DrainRequest, context: CallContext
    ) -> worker_pb2.DrainResponse:
        self._begin_drain(request.timeout_ms / 1000 if request.timeout_ms else None)
        return worker_pb2.DrainResponse()

    async def _check_integrity(
        self, request: worker_pb2.CheckIntegrityRequest, context: CallContext
    ) -> worker_pb2.CheckIntegrityResponse:
        try:
            return await self._integrity()
        except EngineStoppedError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    async def _read_tokenizer(
        self, request: worker_pb2.ReadTokenizerRequest, context: CallContext
    ) -> AsyncIterator[worker_pb2.ReadTokenizerResponse]:
        try:
            paths = await asyncio.to_thread(self._text_files)
        except ConfigError as error:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, str(error))
        for path in paths:
            with path.open("rb") as file:
                while data := await asyncio.to_thread(file.read, PIECE_BYTES):
                    yield worker_pb2.ReadTokenizerResponse(name=path.name, data=data)
