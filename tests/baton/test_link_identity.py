"""Who may use a link: each side proves its role, by keys or by TLS, and nobody else is served."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from baton.errors import ConfigError
from baton.identity.certificates import Certificates
from baton.identity.identity import Identity
from baton.identity.keys import ROLES, Role
from baton.link.frames import CALLERS, MESSAGES, NONCE_BYTES, Hello, Kind, LinkError, Method
from baton.link.router_end import Link, ask_once
from baton.link.worker_end import CallContext, answers
from baton.v1 import worker_pb2
from tests.certificates import Authority, certified, link_folder, swap
from tests.cluster.attacker import own
from tests.identities import ROUTER, WORKER, identity
from tests.link_stub import WorkerPort
from tests.router.proxy import Proxy

ASK = worker_pb2.AttachRequest(request_id="r")
NAME = "decode-0/7"
HEADER = struct.Struct("<IBI")


async def attached(
    request: worker_pb2.AttachRequest, context: CallContext
) -> worker_pb2.AttachResponse:
    return worker_pb2.AttachResponse(spec=worker_pb2.RequestSpec(request_id=request.request_id))


@asynccontextmanager
async def worker(own: Identity = WORKER) -> AsyncIterator[str]:
    port = WorkerPort({Method.ATTACH: answers(attached)}, own, NAME)
    try:
        yield await port.start()
    finally:
        await port.stop()


async def answer(address: str, own: Identity = ROUTER, meant: str = NAME) -> str:
    """What a worker says to a router. Raises OSError, TimeoutError."""
    response = await ask_once(address, own, Method.ATTACH, ASK, 10.0, meant)
    return str(response.spec.request_id)


@pytest.fixture(params=["keys", "tls"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Role], Identity]:
    authority = Authority(tmp_path / "ours")
    return identity if request.param == "keys" else lambda role: certified(authority, role)


def test_every_method_says_who_may_call_it() -> None:
    assert set(CALLERS) == set(MESSAGES) == set(Method)
    assert all(callers and callers <= set(ROLES) for callers in CALLERS.values())


@pytest.mark.parametrize("role", ROLES)
async def test_each_role_is_served_what_it_may_ask_and_nothing_else(
    made: Callable[[Role], Identity], role: Role
) -> None:
    """Nothing is served here, and only who may ask learns of that."""
    port = WorkerPort({}, made("worker"), NAME)
    address = await port.start()
    for method in Method:
        with pytest.raises(LinkError) as ended:
            await ask_once(address, made(role), method, MESSAGES[method][0](), 10.0, NAME)
        is_refused = ended.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert is_refused is (role not in CALLERS[method]), method
    await port.stop()


@pytest.mark.parametrize("kind", ["keys", "tls", "tls at keys", "nothing at keys"])
async def test_a_stranger_is_refused_and_the_log_says_so_once(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It knows whom this cluster trusts, and has nothing that they trust."""
    ours, stranger, router = WORKER, own("router"), ROUTER
    if kind == "nothing at keys":
        stranger = Identity("router")
    elif kind != "keys":
        root = Authority(tmp_path / "ours")
        folder = Path(link_folder(Authority(tmp_path / "others"), "router"))
        swap(folder / "ca.crt", root.ca.read_bytes())
        stranger = Identity("router", tls=Certificates(folder, "router"))
        if kind == "tls":
            ours, router = certified(root, "worker"), certified(root, "router")
    async with worker(ours) as address:
        for _ in range(3):
            with pytest.raises((OSError, LinkError)):
                await answer(address, stranger)
        assert await answer(address, router) == "r"
    told = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(told) == (kind != "nothing at keys")  # it leaves by itself
    assert all(line.startswith("a link from 127.0.0.1 is refused: ") for line in told)


async def test_a_router_leaves_who_is_no_worker(made: Callable[[Role], Identity]) -> None:
    for theirs in (own("worker"), Identity("worker"), made("router")):
        async with worker(theirs) as address:
            with pytest.raises((OSError, TimeoutError)):
                await Link.connect(address, made("router"), keepalive_s=5.0, timeout_s=2.0)


async def test_without_identities_everyone_is_served() -> None:
    async with worker(Identity("worker")) as address:
        assert await answer(address, Identity("router")) == "r"


async def test_a_handshake_that_is_passed_on_to_another_worker_is_refused() -> None:
    """Whoever has a dead worker's port could read what routers send through it."""
    async with worker() as address:
        proxy = await Proxy.to(address)
        assert await answer(proxy.address) == "r"
        with pytest.raises(OSError, match="it wants 'decode-0/6', and this is 'decode-0/7'"):
            await answer(proxy.address, meant="decode-0/6")
        await proxy.close()


def frame(kind: int, payload: bytes, call: int = 0) -> bytes:
    return HEADER.pack(len(payload), kind, call) + payload


async def test_a_recorded_handshake_is_worth_nothing() -> None:
    hello = Hello(5.0, os.urandom(NONCE_BYTES), "router", NAME).to_bytes()
    proof, kinds = b"", []
    async with worker() as address:
        host, _, port = address.rpartition(":")
        for _ in range(2):
            reader, writer = await asyncio.open_connection(host, int(port))
            for kind in (Kind.HELLO, Kind.PROOF):
                writer.write(frame(kind, hello if kind == Kind.HELLO else proof))
                header = await asyncio.wait_for(reader.readexactly(HEADER.size), 10)
                length, said, _ = HEADER.unpack(header)
                kinds.append(said)
                parts = (hello, (await reader.readexactly(length))[:NONCE_BYTES])
                assert ROUTER.keys is not None
                proof = proof or ROUTER.keys.sign("baton link caller", parts)
            writer.close()
    assert kinds == [Kind.CHALLENGE, Kind.WELCOME, Kind.CHALLENGE, Kind.END]


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (frame(Kind.CALL, bytes((Method.ATTACH,)) + ASK.SerializeToString(), 1), "who it is"),
        (frame(Kind.PROOF, bytes(64)), "who it is"),
        (frame(Kind.HELLO, b"baton link 1" + bytes(4)), "it speaks b'baton link 1"),
        (HEADER.pack(2000, Kind.HELLO, 0), "a frame of 2000 bytes is longer than 1024"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", "is longer than 1024"),
    ],
)
async def test_nothing_is_taken_before_it_is_known_who_calls(
    first: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with worker() as address:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(first)
        assert why.encode() in await asyncio.wait_for(reader.read(), 10)
        writer.close()
    assert why in caplog.text


async def test_changed_certificates_count_for_the_next_connection(tmp_path: Path) -> None:
    root, other = Authority(tmp_path), Authority(tmp_path / "other", "other")
    tls = {role: certified(root, role) for role in ROLES}
    async with worker(tls["worker"]) as address:
        assert await answer(address, tls["router"]) == "r"
        for role in ("worker", "router"):
            moved = Path(link_folder(other, role))
            for name in ("ca.crt", "tls.crt", "tls.key"):
                swap(tmp_path / role / name, (moved / name).read_bytes())
        assert await answer(address, tls["router"]) == "r"
        with pytest.raises(OSError):
            await answer(address, certified(root, "router"))


async def test_a_connection_that_says_nothing_is_closed_at_the_end(tmp_path: Path) -> None:
    root = Authority(tmp_path)
    async with worker(certified(root, "worker")) as address:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await answer(address, certified(root, "router")) == "r"
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()


@pytest.mark.parametrize("missing", ["ca.crt", "tls.crt", "tls.key"])
def test_files_that_are_missing_are_named(tmp_path: Path, missing: str) -> None:
    folder = Path(link_folder(Authority(tmp_path), "worker"))
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=r"internal\.folder: .*ca\.crt, tls\.crt, tls\.key") as e:
        Certificates(folder, "worker")
    assert e.value.field == "internal.folder"
