"""Who may call which gRPC method, and with how large a message."""

from __future__ import annotations

from dataclasses import dataclass

from grpc_health.v1 import health

from router.door.api.api import Api
from router.door.connections.credentials import Callers

_OPEN = (f"/{health.SERVICE_NAME}/", "/grpc.reflection.")
_MAX_OPEN_BYTES = 1 << 10  # of what all may call: health's `Watch` keeps its message


@dataclass(frozen=True)
class CallPolicy:
    """What a port takes. Every call but health and reflection needs a token where there are
    `callers`."""

    max_message_bytes: int
    callers: Callers | None = None
    api: Api | None = None
    """It limits messages further, and reads large ones; None: they are read at once."""
    keepalive_s: float = 7.5
    """A peer that is silent for so long gets a PING, and has as long again to answer."""

    def is_open(self, path: str) -> bool:
        """Tell whether anyone may call the method at `path`."""
        return path.startswith(_OPEN)

    def max_received_bytes(self, is_open: bool) -> int:
        """Return how large a message may be that comes in."""
        if is_open:
            return _MAX_OPEN_BYTES
        most = self.max_message_bytes
        return most if self.api is None else min(most, self.api.units.max_request_bytes)
