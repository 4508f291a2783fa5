"""Requests that are over while another worker may still touch their blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.kv.kv_cache import KvCache
from engine.request import RequestId
from engine.schedule.live_request import LiveRequest
from kv_transfer.layout import BlockId


class Quarantine:
    """Own such requests until their workers have provably stopped. Ids may be used again."""

    def __init__(self, kv: KvCache) -> None:
        self._kv = kv
        self._entries: dict[RequestId, _Entry] = {}
        self._set_aside: list[set[BlockId]] | None = None  # per group; None: to be looked up again

    def put(self, request: LiveRequest) -> None:
        """Keep a request's blocks. A late writer could still change a reservation's blocks, so
        they are set aside. A late reader of an export needs their content, so they stay pinned."""
        if request.export is None:
            self._kv.quarantine(request.blocks)
        self._entries.setdefault(request.request_id, _Entry()).requests.append(request)
        self._set_aside = None

    def stopped(self, request_id: RequestId) -> bool:
        """Note that one worker has stopped. Once all of this id have, frees the blocks and returns
        True."""
        entry = self._entries.get(request_id)
        if entry is None:
            return False
        entry.num_stopped += 1
        if entry.num_stopped < len(entry.requests):
            return False
        del self._entries[request_id]
        self._set_aside = None
        for request in entry.requests:
            if request.export is not None:
                self._kv.free(request.blocks)
            else:
                self._kv.unquarantine(request.blocks)
        return True

    def leaves_room_for(self, request: LiveRequest) -> bool:
        """Whether the request would fit if only the requests here held blocks."""
        if not self._entries:
            return True  # it was refused at the door else
        return self._kv.has_room_beside(self._held(), request.blocks, request.num_tokens)

    @property
    def num_blocks(self) -> int:
        """Blocks that are set aside or pinned, each counted once, in the layer group that lacks
        most."""
        return max(map(len, self._held()))

    @property
    def num_bytes(self) -> int:
        """Return the bytes of these blocks over all groups, layers and ranks."""
        return sum(len(held) * size for held, size in zip(self._held(), self._kv.block_bytes))

    def _held(self) -> list[set[BlockId]]:
        if self._set_aside is None:
            self._set_aside = self._kv.set_aside([export.blocks for export in self.exports()])
        return self._set_aside

    def exports(self) -> Iterator[LiveRequest]:
        """Requests whose blocks are still held."""
        for entry in self._entries.values():
            yield from (request for request in entry.requests if request.export is not None)


@dataclass
class _Entry:
    requests: list[LiveRequest] = field(default_factory=list)
    num_stopped: int = 0
