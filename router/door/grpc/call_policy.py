"""Who may call which gRPC method, and with how large a message."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from grpc_health.v1 import health

from router.door.api.api import Api
from router.door.connections.credentials import Callers

T = TypeVar("T")

_OPEN = (f"/{health.SERVICE_NAME}/", "/grpc.reflection.")
_MAX_OPEN_BYTES = 1 << 10  # of what all may call: health's `Watch` keeps its message


class CallPolicy:
    """Every call but health and reflection needs a token where there are `callers`."""

    def __init__(self, callers: Callers | None, api: Api | None = None) -> None:
        """`api` None: messages are as large as the server takes, and read at once."""
        self._callers, self._api = callers, api

    def is_open(self, path: str) -> bool:
        """Whether anyone may call it."""
        return path.startswith(_OPEN)

    def admitted(self, metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
        """Return the caller's tenant; None: any. Raises UnauthenticatedError."""
        return None if self._callers is None else self._callers.tenant_of(metadata)

    def max_bytes(self, is_open: bool) -> int | None:
        """Of a message that comes in; None: as many as the server takes."""
        if is_open:
            return _MAX_OPEN_BYTES
        return None if self._api is None else self._api.units.max_request_bytes

    async def off_loop(self, work: Callable[[], T], tenant: str | None, num_bytes: int) -> T:
        """Read a large message."""
        if self._api is None:
            return work()
        return await self._api.off_loop(work, tenant, num_bytes)
