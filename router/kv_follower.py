"""Follows one worker's KV events into the prefix index."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable

from baton.v1 import worker_pb2, worker_pb2_grpc
from kv_transfer.block_hash import HASH_BYTES, BlockHash
from router.prefix_index import PrefixIndex

log = logging.getLogger(__name__)


class IndexState(enum.Enum):
    """EXACT: the index says what the worker holds. DEGRADED: events were missed, or none came."""

    EXACT = "exact"
    DEGRADED = "degraded"


def split_hashes(data: bytes) -> list[BlockHash]:
    return [BlockHash(data[i : i + HASH_BYTES]) for i in range(0, len(data), HASH_BYTES)]


class KvFollower:
    """Own what the index knows of one worker: its snapshot, then every change, without a gap."""

    def __init__(self, index: PrefixIndex, slot: int, incarnation: int) -> None:
        self._index, self._slot, self._incarnation = index, slot, incarnation
        self._sequence: int | None = None
        self.state = IndexState.DEGRADED
        self.num_gaps = 0

    async def run(
        self, stub: worker_pb2_grpc.WorkerServiceStub, on_connected: Callable[[], None]
    ) -> bool:
        """Follow one subscription; raises grpc.aio.AioRpcError when it breaks.

        `on_connected` is called with the first message. False when the worker ended it, True when
        events were missed and it is to be made anew at once.
        """
        self._sequence = None
        call = stub.SubscribeKv(worker_pb2.SubscribeKvRequest())
        try:
            async for message in call:
                first = self._sequence is None
                if not self.apply(message):
                    return message.incarnation == self._incarnation
                if first:
                    on_connected()
            return False
        finally:
            self.state = IndexState.DEGRADED
            call.cancel()

    def apply(self, message: worker_pb2.SubscribeKvResponse) -> bool:
        """Take in one message; False when it does not follow the one before: subscribe again."""
        if message.incarnation != self._incarnation:
            log.warning("slot %d answers as another incarnation", self._slot)
            return False
        if message.snapshot:
            self._index.clear(self._slot)
        elif self._sequence is None or message.sequence != self._sequence + 1:
            self.num_gaps += 1
            self.state = IndexState.DEGRADED
            return False
        self._sequence = message.sequence
        self._index.remove(self._slot, split_hashes(message.removed))
        for stored in message.stored:
            parent = BlockHash(stored.parent_hash) if stored.parent_hash else None
            self._index.store(self._slot, parent, split_hashes(stored.hashes))
        self.state = IndexState.EXACT
        return True
