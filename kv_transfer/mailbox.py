"""From the progress thread to rank 0's event loop: one wake-up for whatever has come together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton.v1 import transfer_pb2
from kv_transfer.admission import Decision


@dataclass(frozen=True)
class PeerLost:
    """The process at this transfer address can no longer be reached."""

    address: bytes


Event = transfer_pb2.TransferMessage | PeerLost | Decision
Post = Callable[[Callable[[], None]], object]


class Mailbox:
    """Events for one reader. Without one they are dropped: a rank above 0 and a worker of the other
    role never have one, and before rank 0 has bound it no peer knows this worker's address."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._reader: tuple[Post, Callable[[Event], None]] | None = None
        self._posted = False

    def bind(self, post: Post, handle: Callable[[Event], None]) -> None:
        """`post` runs a callback on the reader's thread (`loop.call_soon_threadsafe`)."""
        with self._lock:
            assert self._reader is None, "a mailbox has one reader"
            self._reader = (post, handle)

    @property
    def num_waiting(self) -> int:
        return len(self._events)

    def put(self, *events: Event) -> None:
        with self._lock:
            if self._reader is None:
                return
            self._events.extend(events)
            if self._posted:
                return
            self._posted = True
            post = self._reader[0]
        try:
            post(self._deliver)
        except RuntimeError:
            # The loop is closed: this process is on its way out and nobody reads any more.
            self._posted = False

    def _deliver(self) -> None:
        with self._lock:
            events, self._events = self._events, []
            self._posted = False
            assert self._reader is not None
            handle = self._reader[1]
        waiting = deque(events)
        try:
            while waiting:
                handle(waiting.popleft())
        finally:
            if waiting:  # one event failed: the loop reports it, the others are handled next
                self._put_back(waiting)

    def _put_back(self, events: Iterable[Event]) -> None:
        with self._lock:
            assert self._reader is not None
            self._events[:0] = events
            post, posted, self._posted = self._reader[0], self._posted, True
        if not posted:
            post(self._deliver)
