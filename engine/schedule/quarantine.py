"""Requests that are over while another worker may still touch their blocks."""

from __future__ import annotations

from collections.abc import Iterator

from engine.kv.kv_cache import KvCache
from engine.request import RequestId
from engine.schedule.live_request import LiveRequest
from kv_transfer.layout import BlockId


class Quarantine:
    """Own such requests until their workers have provably stopped."""

    def __init__(self, kv: KvCache) -> None:
        self._kv = kv
        self._requests: dict[RequestId, LiveRequest] = {}
        self._set_aside: list[set[BlockId]] | None = None  # per group; None: to be looked up again

    def holds(self, request_id: RequestId) -> bool:
        return request_id in self._requests

    def put(self, request: LiveRequest) -> None:
        """Keep a request's blocks. A late writer could still change a reservation's blocks, so
        they are set aside. A late reader of an export needs their content, so they stay pinned."""
        if request.export is None:
            self._kv.quarantine(request.blocks)
        self._requests[request.request_id] = request
        self._set_aside = None

    def free(self, request_id: RequestId) -> bool:
        """The other worker has stopped: free the blocks. False: there are none."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self._set_aside = None
        if request.export is not None:
            self._kv.free(request.blocks)
        else:
            self._kv.unquarantine(request.blocks)
        return True

    def leaves_room_for(self, request: LiveRequest) -> bool:
        """Whether the request would fit if only the requests here held blocks."""
        if not self._requests:
            return True  # it was refused at the door else
        return self._kv.has_room_beside(self._held(), request.blocks, request.num_tokens)

    @property
    def num_blocks(self) -> int:
        """Blocks that are set aside or pinned, each counted once, in the layer group that lacks
        most."""
        return max(map(len, self._held()))

    @property
    def num_bytes(self) -> int:
        """Bytes of these blocks over all groups, layers and ranks."""
        return sum(len(held) * size for held, size in zip(self._held(), self._kv.block_bytes))

    def _held(self) -> list[set[BlockId]]:
        if self._set_aside is None:
            self._set_aside = self._kv.set_aside([export.blocks for export in self.exports()])
        return self._set_aside

    def exports(self) -> Iterator[LiveRequest]:
        """Requests whose blocks are still pinned."""
        return (request for request in self._requests.values() if request.export is not None)
