"""A transport whose puts wait until the test lets them go."""

from __future__ import annotations

from kv_transfer.transports.memory_transport import Operation, ThreadScheduler


class HeldPuts(ThreadScheduler):
    """Keeps puts and flushes while `holds`; everything else runs."""

    def __init__(self) -> None:
        super().__init__()
        self.holds = True
        self.held: list[Operation] = []

    def schedule(self, operation: Operation) -> None:
        if self.holds and operation.kind in ("put", "flush"):
            self.held.append(operation)
        else:
            super().schedule(operation)

    def go_on(self) -> None:
        for operation in self.held:
            self.schedule(operation)
