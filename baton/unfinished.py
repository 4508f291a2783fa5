"""One budget of bytes for input that is incomplete, over all who send."""

from __future__ import annotations

from typing import Protocol

from baton.errors import OverloadedError

_LEAST_BYTES = 1024  # what holding anything costs
_WHY = "too much is being sent at once: this began first, and is not whole yet"


class Sender(Protocol):
    def give_way(self, error: OverloadedError) -> None:
        """Drop what came, and end with this error. What still comes counts for nothing."""


class Unfinished:
    """Own the budget. When it is used up, the sender that began first gives way: it is slow or
    stalled, and never one whose input comes at once. So no number of stalled senders keeps others
    out."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self.num_bytes = max_bytes, 0
        self._held: dict[Sender, int] = {}  # in the order in which they began

    def hold(self, sender: Sender, num_bytes: int) -> None:
        """Count what came. `sender` itself may have to give way, unless it is alone."""
        added = num_bytes if sender in self._held else max(num_bytes, _LEAST_BYTES)
        self._held[sender] = self._held.get(sender, 0) + added
        self.num_bytes += added
        while self.num_bytes > self._max_bytes and len(self._held) > 1:
            first = next(iter(self._held))
            self.let_go(first)
            first.give_way(OverloadedError(_WHY, retry_after_s=1.0))

    def let_go(self, sender: Sender) -> None:
        """Forget a sender whose input is complete, or which has gone."""
        self.num_bytes -= self._held.pop(sender, 0)
