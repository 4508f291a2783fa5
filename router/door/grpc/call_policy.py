"""Checks of a call before the service sees it: whose it is, and whether it speaks in its caller's
name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from google.protobuf.message import Message
from grpc_health.v1 import health

from router.door.api.api import Intake
from router.door.connections.credentials import Callers, confine

T = TypeVar("T")

_OPEN = (f"/{health.SERVICE_NAME}/", "/grpc.reflection.")
_MAX_OPEN_BYTES = 1 << 10  # of what all may call: health's `Watch` keeps its message


class Gate:
    """With `callers`, every call but health and reflection needs a token. It confines tenants to
    themselves."""

    def __init__(self, callers: Callers | None, intake: Intake | None = None) -> None:
        """`intake` None: messages are as large as the server takes, and read at once."""
        self._callers, self._intake = callers, intake

    def is_open(self, path: str) -> bool:
        return path.startswith(_OPEN)

    def admitted(self, metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
        """The caller's tenant; None: any. Raises UnauthenticatedError."""
        return None if self._callers is None else self._callers.tenant_of(metadata)

    def max_bytes(self, is_open: bool) -> int | None:
        if is_open:
            return _MAX_OPEN_BYTES
        return None if self._intake is None else self._intake.door.max_request_bytes

    async def off_loop(self, work: Callable[[], T], tenant: str | None, num_bytes: int) -> T:
        if self._intake is None:
            return work()
        return await self._intake.off_loop(work, tenant, num_bytes)

    def confine(self, message: Message, tenant: str | None) -> None:
        """Raises PermissionDeniedError where a message speaks for another tenant."""
        confine(message, tenant)
