"""A scheduler of the in-memory transport that runs only what the test asks for."""

from __future__ import annotations

from collections.abc import Callable

from kv_transfer.memory_transport import Operation


class ManualScheduler:
    """Run nothing by itself. `pending` is in the order of the calls."""

    def __init__(self) -> None:
        self.pending: list[Operation] = []

    def schedule(self, operation: Operation) -> None:
        self.pending.append(operation)

    def discard(self, unwanted: Callable[[Operation], bool]) -> None:
        self.pending = [operation for operation in self.pending if not unwanted(operation)]

    def run(self, operation: Operation) -> None:
        self.pending.remove(operation)
        operation.run()

    def drop(self, operation: Operation) -> None:
        self.pending.remove(operation)

    def run_all(self, kinds: tuple[str, ...] = ("put", "flush", "message", "lost")) -> int:
        """Run pending operations of these kinds, and what they cause; returns how many ran."""
        ran = 0
        while chosen := next((o for o in self.pending if o.kind in kinds), None):
            self.run(chosen)
            ran += 1
        return ran
