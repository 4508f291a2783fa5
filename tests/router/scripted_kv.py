"""A scripted worker's KV events: what it says its prefix cache holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
import numpy as np

from baton.v1 import worker_pb2, worker_pb2_grpc
from kv_transfer.block_hash import block_hashes, chain_seed

Context = grpc.aio.ServicerContext[Any, Any]

BLOCK_SIZE = 4


class ScriptedKv(worker_pb2_grpc.WorkerServiceServicer):
    """Own the blocks a worker claims to hold, and who is told of them."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.held: list[bytes] = []
        self.text_files = dict[str, bytes]()
        self.queues: list[asyncio.Queue[worker_pb2.SubscribeKvResponse | None]] = []
        """One per subscriber; None: this message is lost on the way."""

    async def SubscribeKv(  # noqa: N802
        self, request: worker_pb2.SubscribeKvRequest, context: Context
    ) -> AsyncIterator[worker_pb2.SubscribeKvResponse]:
        queue: asyncio.Queue[worker_pb2.SubscribeKvResponse | None] = asyncio.Queue()
        self.queues.append(queue)
        sequence = 1
        yield worker_pb2.SubscribeKvResponse(
            incarnation=self.incarnation,
            sequence=sequence,
            snapshot=True,
            stored=[worker_pb2.BlockStored(hashes=chain) for chain in self.held],
        )
        while True:
            message = await queue.get()
            sequence += 1
            if message is not None:
                message.sequence, message.incarnation = sequence, self.incarnation
                yield message

    async def ReadTokenizer(  # noqa: N802
        self, request: worker_pb2.ReadTokenizerRequest, context: Context
    ) -> AsyncIterator[worker_pb2.ReadTokenizerResponse]:
        for name, data in self.text_files.items():
            yield worker_pb2.ReadTokenizerResponse(name=name, data=data)

    def hold(self, kv_fingerprint: bytes, tokens: Sequence[int], salt: str = "") -> None:
        """A prompt's blocks became shareable here."""
        ids = np.asarray(tokens, dtype=np.uint32)
        chain = b"".join(block_hashes(chain_seed(kv_fingerprint, salt), ids, BLOCK_SIZE))
        self.held.append(chain)
        for queue in self.queues:
            stored = [worker_pb2.BlockStored(hashes=chain)]
            queue.put_nowait(worker_pb2.SubscribeKvResponse(stored=stored))
