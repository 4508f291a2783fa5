"""`WorkerService`: what any worker tells of itself, whatever its role."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from baton.errors import ConfigError
from baton.v1 import worker_pb2, worker_pb2_grpc
from cluster.worker.kv_feed import KvChange, KvFeed
from engine.errors import EngineStoppedError

Context = grpc.aio.ServicerContext[Any, Any]

PIECE_BYTES = 1 << 20  # of a file, in one message


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """`load` asks the engine for its load now; `drain` starts a drain and returns at once;
    `text_files` finds the model's, and raises ConfigError where there are none."""

    def __init__(
        self,
        incarnation: int,
        feed: KvFeed,
        load: Callable[[], Awaitable[worker_pb2.WorkerLoad]],
        drain: Callable[[float | None], None],
        integrity: Callable[[], Awaitable[worker_pb2.CheckIntegrityResponse]],
        text_files: Callable[[], Sequence[Path]],
    ) -> None:
        self._incarnation = incarnation
        self._feed = feed
        self._load = load
        self._drain = drain
        self._integrity = integrity
        self._text_files = text_files

    async def SubscribeKv(  # noqa: N802
        self, request: worker_pb2.SubscribeKvRequest, context: Context
    ) -> AsyncIterator[worker_pb2.SubscribeKvResponse]:
        subscription = self._feed.subscribe()
        sequence = 0
        try:
            async for change in subscription.changes():
                yield _change_message(change, self._incarnation, sequence)
                sequence += 1
        finally:
            self._feed.unsubscribe(subscription)

    async def Load(  # noqa: N802
        self, request: worker_pb2.LoadRequest, context: Context
    ) -> worker_pb2.LoadResponse:
        try:
            return worker_pb2.LoadResponse(load=await self._load())
        except EngineStoppedError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    async def Drain(  # noqa: N802
        self, request: worker_pb2.DrainRequest, context: Context
    ) -> worker_pb2.DrainResponse:
        self._drain(request.timeout_ms / 1000 if request.timeout_ms else None)
        return worker_pb2.DrainResponse()

    async def CheckIntegrity(  # noqa: N802
        self, request: worker_pb2.CheckIntegrityRequest, context: Context
    ) -> worker_pb2.CheckIntegrityResponse:
        try:
            return await self._integrity()
        except EngineStoppedError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    async def ReadTokenizer(  # noqa: N802
        self, request: worker_pb2.ReadTokenizerRequest, context: Context
    ) -> AsyncIterator[worker_pb2.ReadTokenizerResponse]:
        try:
            paths = await asyncio.to_thread(self._text_files)
        except ConfigError as error:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, str(error))
        for path in paths:
            with path.open("rb") as file:
                while data := await asyncio.to_thread(file.read, PIECE_BYTES):
                    yield worker_pb2.ReadTokenizerResponse(name=path.name, data=data)


def _change_message(
    change: KvChange, incarnation: int, sequence: int
) -> worker_pb2.SubscribeKvResponse:
    return worker_pb2.SubscribeKvResponse(
        incarnation=incarnation,
        sequence=sequence,
        snapshot=change.snapshot,
        stored=[
            worker_pb2.BlockStored(parent_hash=parent or b"", hashes=b"".join(hashes))
            for parent, hashes in change.stored
        ],
        removed=b"".join(change.removed),
    )
