"""What all connections of a router's doors share: turns of the event loop, room for connections,
and bytes of input that is incomplete.

To read what a client sends costs far more than to send it. So input is read in turns of about a
millisecond, and all turns of a round of the loop take `_ROUND_S`. What serves no call uses up its
connection's `Allowance`; then the connection ends.
"""

from __future__ import annotations

import logging
import math
import resource
import time
from asyncio import Task, get_running_loop
from collections import deque
from collections.abc import Callable
from typing import Protocol

from baton.unfinished import Unfinished

log = logging.getLogger(__name__)

_ROUND_S = 0.004
_BURST, _PER_S, _MOST = 2000.0, 200.0, 65_536.0
_OTHER_FILES = 256  # than clients' connections


class Allowance:
    """What a client may still send that serves no call, in small frames or chunks. It grows with
    time up to a burst, and with what calls bring: who is sent much has much to say of it."""

    def __init__(self) -> None:
        self._left, self._grown_s = _BURST, time.monotonic()

    def earn(self, amount: int) -> None:
        if self._left < _MOST:
            self._left += amount

    def spend(self, amount: int) -> bool:
        """Take so much of it. False: it is used up."""
        self._left -= amount
        if self._left < 0:
            now_s = time.monotonic()
            self._left += min(_BURST, (now_s - self._grown_s) * _PER_S)
            self._grown_s = now_s
        return self._left >= 0


class Turns:
    """Own the line of connections with input to read. Each has one turn, then it is the next's."""

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s, self._begun_s, self._left_s = now_s, -math.inf, 0.0
        self._line: deque[Callable[[], bool]] = deque()
        self._is_due = False

    def take(self, turn: Callable[[], bool]) -> bool:
        """Run `turn` now, or after those in line, and again until it returns False. True: it waits
        in line, and must not be taken again until then."""
        now_s = self._now_s()
        if now_s - self._begun_s > 2 * _ROUND_S:  # else the loop may still be in that round
            self._begun_s, self._left_s = now_s, _ROUND_S
        has_more = True
        if self._line or self._left_s <= 0:
            self._line.append(turn)
        else:
            has_more = self._run(turn, now_s)
        self._go_on()
        return has_more

    def _run(self, turn: Callable[[], bool], now_s: float) -> bool:
        if has_more := turn():
            self._line.append(turn)
        self._left_s -= self._now_s() - now_s
        return has_more

    def _go_on(self) -> None:
        if self._line and not self._is_due:
            self._is_due = True
            get_running_loop().call_soon(self._begin_round)

    def _begin_round(self) -> None:
        self._is_due = False
        self._begun_s, self._left_s = self._now_s(), _ROUND_S
        try:
            while self._line and self._left_s > 0:
                self._run(self._line.popleft(), self._now_s())
        finally:  # a turn that fails is its connection's fault alone
            self._go_on()


class Guest(Protocol):
    """A client's connection."""

    arriving: Task[None] | None
    """Its handshake."""

    @property
    def is_idle(self) -> bool:
        """Tell whether no whole request of it is being answered, but for what anyone may ask."""

    def leave(self) -> None:
        """End it, to make room."""


class Sharing:
    """Own what the connections of a process share. Of connections there are at most so many: a new
    one takes the place of the oldest that is idle."""

    def __init__(
        self, max_connections: int, max_unfinished_bytes: int, files_each: int = 1
    ) -> None:
        """`files_each`: that a connection may hold, 2 with TLS (`Acceptor`)."""
        self.turns, self.unfinished = Turns(), Unfinished(max_unfinished_bytes)
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_guests = max(1, min(max_connections, (files - _OTHER_FILES) // files_each))
        self.max_file = files - _OTHER_FILES // 2
        """Where no lower one is left, no connection is taken: others need files too."""
        self._guests: dict[Guest, None] = {}
        self._num_ended, self._told_s = 0, -math.inf

    def admit(self, guest: Guest) -> bool:
        """Count it in. False: there is no room, since all are being served."""
        if len(self._guests) >= self._max_guests and not self.make_room():
            return False
        self._guests[guest] = None
        return True

    def make_room(self) -> bool:
        """End the oldest that is idle. False: none is."""
        idle = next((one for one in self._guests if one.is_idle), None)
        if idle is None:
            return False
        self.lose(idle)
        if idle.arriving is not None:
            idle.arriving.cancel()
        idle.leave()
        return True

    def lose(self, guest: Guest) -> None:
        self._guests.pop(guest, None)

    def note_ended(self, why: str) -> None:
        """Log that a connection is ended for what it sends: a line a second at most."""
        self._num_ended += 1
        if time.monotonic() - self._told_s >= 1:
            log.warning("clients' connections are ended: %d, the last: %s", self._num_ended, why)
            self._num_ended, self._told_s = 0, time.monotonic()
