"""A worker's link as a router or an operator has it; and a worker's port without a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from baton.identity.identity import Identity
from baton.link.frames import LinkError, Method
from baton.link.router_end import Call, Link, ask_once
from baton.link.worker_end import CallContext, LinkServer, Served
from baton.v1 import worker_pb2
from tests.identities import OPERATOR, ROUTER, WORKER


class StubCall:
    """One call: what it brings, in order. Raises LinkError where the call ends with one."""

    def __init__(self, begin: Callable[[Any, StubCall], Any]) -> None:
        """`begin`: the call with its first message."""
        self._begin = begin
        self._call: Call | None = None
        self._came: asyncio.Queue[Any] = asyncio.Queue()

    async def write(self, message: Any) -> None:
        if self._call is None:
            self._call = await self._begin(message, self)
        else:
            self._call.send(message)

    async def read(self) -> Any:
        """None: the call has ended in order."""
        came = await self._came.get()
        if isinstance(came, LinkError):
            raise came
        return came

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._all()

    async def _all(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not None:
            yield message

    def cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()

    def on_message(self, message: Any) -> None:
        self._came.put_nowait(message)

    def on_end(self, error: LinkError | None) -> None:
        self._came.put_nowait(error)


class LinkStub:
    """Own a link, made with the first call."""

    def __init__(self, address: str, identity: Identity = ROUTER) -> None:
        self._address, self._identity = address, identity
        self._link: Link | None = None

    async def link(self) -> Link:
        if self._link is None:
            self._link = await Link.connect(
                self._address, self._identity, keepalive_s=2.0, timeout_s=10.0
            )
        return self._link

    async def close(self) -> None:
        if self._link is not None:
            self._link.close("the test is over")

    def session(self) -> StubCall:
        return self._call(Method.SESSION)

    async def prefill(self, request: worker_pb2.PrefillRequest) -> StubCall:
        return await self._begun(Method.PREFILL, request)

    async def follow_kv(self) -> StubCall:
        return await self._begun(Method.FOLLOW_KV, worker_pb2.SubscribeKvRequest())

    async def attach(self, request: worker_pb2.AttachRequest) -> worker_pb2.AttachResponse:
        link = await self.link()
        response: worker_pb2.AttachResponse = await link.ask(Method.ATTACH, request, 10.0)
        return response

    def _call(self, method: Method) -> StubCall:
        async def begin(message: Any, caller: StubCall) -> Call:
            return (await self.link()).call(method, message, caller)

        return StubCall(begin)

    async def _begun(self, method: Method, request: Any) -> StubCall:
        call = self._call(method)
        await call.write(request)
        return call


async def books_at(address: str) -> worker_pb2.CheckIntegrityResponse:
    """What a worker holds. Raises LinkError, OSError."""
    request = worker_pb2.CheckIntegrityRequest()
    books: worker_pb2.CheckIntegrityResponse
    books = await ask_once(address, OPERATOR, Method.CHECK_INTEGRITY, request, 10.0)
    return books


ASK = worker_pb2.AttachRequest(request_id="r")


async def attached(
    request: worker_pb2.AttachRequest, context: CallContext
) -> worker_pb2.AttachResponse:
    return worker_pb2.AttachResponse(spec=worker_pb2.RequestSpec(request_id=request.request_id))


class WorkerPort:
    """Own a worker's port."""

    def __init__(
        self,
        methods: Mapping[Method, Served],
        identity: Identity = WORKER,
        name: str = "",
    ) -> None:
        self.links = LinkServer(methods, identity, name)
        self.address = ""

    async def start(self, port: int = 0) -> str:
        """The address."""
        self.address = f"127.0.0.1:{await self.links.start('127.0.0.1', port)}"
        return self.address

    @property
    def num_unsent(self) -> int:
        """Bytes."""
        return self.links.num_unsent

    async def stop(self) -> None:
        await self.links.stop()
