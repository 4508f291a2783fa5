"""Calls of the control service: who makes them, and that its answers are its own.

With keys, a call carries its role, its time, a nonce and a signature over these, its path and the
digest of its request (of nothing, where the caller sends a stream). Each message of the answer is
preceded by the operator's signature over the call's nonce, the message's number and its bytes. With
TLS the certificates say who it is.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import Any, cast

import grpc
import grpc.aio

from baton import status
from baton.errors import (
    BatonError,
    OverloadedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from baton.identity.certificates import roles_in
from baton.identity.identity import Identity
from baton.identity.keys import SIGNATURE_BYTES, Keys
from baton.identity.refusals import Refusals
from baton.v1 import control_pb2_grpc

log = logging.getLogger(__name__)

WINDOW_S = 60.0
"""How far a call's time may be from the service's."""
_MAX_NONCES = 1 << 17
_KEY = "baton-identity-bin"
_CALL, _ANSWER = "baton control call", "baton control answer"
_STAMP = struct.Struct(">Q16s")  # nanoseconds since 1970, nonce
_OPEN = "/grpc.health.v1."
Seal = Callable[[bytes], bytes]


def _parts(path: str, role: str, stamp: bytes, body: bytes) -> tuple[bytes, ...]:
    return path.encode(), role.encode(), stamp, hashlib.sha256(body).digest()


def _numbered(nonce: bytes, number: int, message: bytes) -> tuple[bytes, ...]:
    return nonce, number.to_bytes(8, "big"), message


# --- the caller's side ----------------------------------------------------------------------------


def control_channel(
    module: Any, address: str, options: tuple[tuple[str, int], ...], identity: Identity
) -> Any:
    """Open a channel to a control service. `module`: grpc or grpc.aio."""
    if identity.tls is not None:
        return identity.tls.channel(module, address, options)
    return module.insecure_channel(address, options=options)


def signed_metadata(
    keys: Keys, path: str, body: bytes, now_ns: int
) -> tuple[tuple[tuple[str, bytes], ...], bytes]:
    """Return the metadata that a call carries, and its nonce."""
    nonce, role = os.urandom(16), keys.role
    stamp = _STAMP.pack(now_ns, nonce)
    signature = keys.sign(_CALL, _parts(path, role, stamp, body))
    return ((_KEY, stamp + signature + role.encode()),), nonce


def control_stub(channel: Any, identity: Identity) -> control_pb2_grpc.ControlServiceStub:
    """Make the service's stub on a channel of either kind; its types speak of asyncio alone."""
    signed = channel if identity.keys is None else _SignedChannel(channel, identity.keys)
    return control_pb2_grpc.ControlServiceStub(cast(grpc.aio.Channel, signed))


class _SignedChannel:
    """As much of a channel as a generated stub uses."""

    def __init__(self, channel: Any, keys: Keys) -> None:
        self._channel, self._keys = channel, keys

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        """Wrap unary_unary, unary_stream, stream_unary or stream_stream."""
        return partial(self._method, getattr(self._channel, kind), kind.startswith("stream"))

    def _method(
        self,
        make: Callable[..., Any],
        sends_stream: bool,
        path: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **more: Any,
    ) -> Callable[..., Any]:
        def call(request: Any = None, **options: Any) -> Any:
            body = b"" if sends_stream else request_serializer(request)
            metadata, nonce = signed_metadata(self._keys, path, body, time.time_ns())
            checked = _opening(self._keys, nonce, response_deserializer)
            begin = make(path, request_serializer if sends_stream else bytes, checked, **more)
            return begin(request if sends_stream else body, metadata=metadata, **options)

        return call


def _opening(keys: Keys, nonce: bytes, read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return what reads one call's answers. gRPC gives a None from it to an asyncio caller, and
    makes an INTERNAL of it for another one."""
    numbers = itertools.count(1)

    def opened(data: bytes) -> Any:
        signature, message = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:]
        parts = _numbered(nonce, next(numbers), message)
        if not keys.verify(("operator",), _ANSWER, parts, signature):
            log.error("an answer is not signed by this cluster's operator: %d bytes", len(data))
            return None
        return read(message)

    return opened


# --- the service's side ---------------------------------------------------------------------------


class ControlGuard(grpc.aio.ServerInterceptor):
    """Own which calls were taken. `allowed` has the roles that may make each call, by its name;
    health is open to all."""

    def __init__(
        self,
        identity: Identity,
        allowed: Mapping[str, Collection[str]],
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._identity, self._allowed, self._now_s = identity, allowed, now_s
        self._started_s = now_s()
        self._nonces: dict[bytes, float] = {}  # taken calls, the oldest first
        self._refusals = Refusals(log)

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith(_OPEN):
            return handler
        return _guarded(handler, partial(self._take_in, details))

    async def _take_in(self, details: Any, body: bytes, context: Any) -> Seal:
        """Return what the answer's messages go through, or end the call."""
        try:
            return self._checked(details, body, context)
        except BatonError as error:
            peer, name = context.peer().rpartition(":")[0], details.method.rpartition("/")[2]
            self._refusals.tell(f"a call of {name}", peer, error.message)
            await status.abort(context, error)

    def _checked(self, details: Any, body: bytes, context: Any) -> Seal:
        name = details.method.rpartition("/")[2]
        allowed, keys = self._allowed.get(name, ()), self._identity.keys
        if keys is None:
            uris = context.auth_context().get("peer_uri", ())
            _check_role(name, roles_in([uri.decode() for uri in uris]), allowed)
            return lambda message: message
        said = next((value for key, value in details.invocation_metadata if key == _KEY), b"")
        stamp, rest = said[: _STAMP.size], said[_STAMP.size :]
        signature, role = rest[:SIGNATURE_BYTES], rest[SIGNATURE_BYTES:].decode(errors="replace")
        parts = _parts(details.method, role, stamp, body)
        if len(stamp) < _STAMP.size or not keys.verify((role,), _CALL, parts, signature):
            raise UnauthenticatedError("it is not signed with a key of this cluster")
        self._remember(*_STAMP.unpack(stamp))
        _check_role(name, [role], allowed)
        return _sealing(keys, stamp[-16:])

    def _remember(self, sent_ns: int, nonce: bytes) -> None:
        """Refuse a call that is dated wrong or was taken before."""
        now_s, sent_s = self._now_s(), sent_ns / 1e9
        if abs(now_s - sent_s) > WINDOW_S:
            raise UnauthenticatedError(
                f"it is dated {sent_s - now_s:+.0f} s from the control service's clock, and "
                f"{WINDOW_S:.0f} s are allowed: set the clocks of both machines"
            )
        if sent_s < self._started_s:  # what was taken before the start is not remembered
            raise UnavailableError("it is dated before the control service's start: call again")
        while self._nonces and now_s - next(iter(self._nonces.values())) > 2 * WINDOW_S:
            del self._nonces[next(iter(self._nonces))]
        if nonce in self._nonces:
            raise UnauthenticatedError("it was taken before: a call counts once")
        if len(self._nonces) >= _MAX_NONCES:
            raise OverloadedError("too many calls within the last minute", retry_after_s=WINDOW_S)
        self._nonces[nonce] = now_s


def _check_role(name: str, roles: Collection[str], allowed: Collection[str]) -> None:
    if not set(roles) & set(allowed):
        who = " or ".join(roles) or "nobody of this cluster"
        wanted = " or ".join(allowed) or "nobody"
        raise PermissionDeniedError(f"the caller is {who}, and {name} is for {wanted} alone")


def _sealing(keys: Keys, nonce: bytes) -> Seal:
    """Return what puts the operator's signature before each message of one call's answer."""
    numbers = itertools.count(1)
    return lambda message: keys.sign(_ANSWER, _numbered(nonce, next(numbers), message)) + message


def _guarded(handler: Any, take_in: Callable[[bytes, Any], Awaitable[Seal]]) -> Any:
    """Put a handler behind `take_in`, which sees a request's bytes before they are read."""
    sends_stream, gets_stream = handler.request_streaming, handler.response_streaming
    kind = f"{'stream' if sends_stream else 'unary'}_{'stream' if gets_stream else 'unary'}"
    run, read, write = (
        getattr(handler, kind),
        handler.request_deserializer,
        handler.response_serializer,
    )

    async def taken(request: Any, context: Any) -> tuple[Any, Seal]:
        sealed = await take_in(b"" if sends_stream else request, context)
        return (request if sends_stream else read(request)), sealed

    async def answer(request: Any, context: Any) -> bytes:
        request, sealed = await taken(request, context)
        return sealed(write(await run(request, context)))

    async def stream(request: Any, context: Any) -> AsyncIterator[bytes]:
        request, sealed = await taken(request, context)
        async for response in run(request, context):
            yield sealed(write(response))

    made = getattr(grpc, f"{kind}_rpc_method_handler")
    return made(stream if gets_stream else answer, read if sends_stream else bytes, bytes)
