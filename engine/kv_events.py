"""News of what became and ceased to be shareable in a prefix cache, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.request import BlocksRemovedEvent, BlocksStoredEvent
from kv_transfer.block_hash import BlockHash

KvEvent = BlocksStoredEvent | BlocksRemovedEvent


class KvEventLog:
    """Owns the events since the last `take`; blocks removed in a row are one event."""

    def __init__(self) -> None:
        self._events: list[KvEvent] = []
        self._removed: list[BlockHash] = []

    def __bool__(self) -> bool:
        return bool(self._events or self._removed)

    def take(self) -> list[KvEvent]:
        self._flush_removed()
        events, self._events = self._events, []
        return events

    def removed(self, block_hash: BlockHash) -> None:
        self._removed.append(block_hash)

    def stored(self, hashes: Sequence[BlockHash], start: int, is_new: Sequence[bool]) -> None:
        """The new blocks of the chain `hashes` from `start` on, as `is_new` says of each."""
        self._flush_removed()
        for begin, end in _runs(is_new):
            parent = hashes[start + begin - 1] if start + begin else None
            self._events.append(
                BlocksStoredEvent(parent, tuple(hashes[start + begin : start + end]))
            )

    def _flush_removed(self) -> None:
        if self._removed:
            self._events.append(BlocksRemovedEvent(tuple(self._removed)))
            self._removed = []


def _runs(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Ranges [begin, end) of consecutive true flags."""
    begin = None
    for index, flag in enumerate([*flags, False]):
        if flag and begin is None:
            begin = index
        elif not flag and begin is not None:
            yield begin, index
            begin = None
