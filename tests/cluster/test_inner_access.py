"""Who may call a worker and the control service, by keys and by TLS, and who believes them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.control.calls import WINDOW_S, ControlGuard, control_stub, signed_metadata
from baton.control.client import ControlClient
from baton.errors import ConfigError, UnauthenticatedError
from baton.identity.certificates import Certificates
from baton.identity.identity import Identity
from baton.identity.keys import ROLES, Role
from baton.link import frames
from baton.link.frames import NONCE_BYTES, Hello, Kind, LinkError, Method
from baton.link.router_end import Link, ask_once
from baton.link.worker_end import answers
from baton.v1 import control_pb2, control_pb2_grpc
from cluster.registry.control_access import CALLERS, control_server, listen_at
from cluster.registry.control_service import Changes, serve
from tests.certificates import Authority, certified, link_folder
from tests.cluster.attacker import SERVICE, own, refusal
from tests.cluster.test_control_service import make_registry
from tests.identities import OPERATOR, ROUTER, WORKER, identity
from tests.link_stub import ASK, WorkerPort, attached
from tests.router.proxy import Proxy

NAME = "decode-0/7"
HEADER = struct.Struct("<IBI")


@contextlib.asynccontextmanager
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
    return identity if request.param == "keys" else partial(certified, Authority(tmp_path))


async def test_changed_certificates_count_for_the_next_call_at_both_sides(tmp_path: Path) -> None:
    root, registry = Authority(tmp_path), make_registry()
    tls = {role: certified(root, role) for role in ROLES}
    former = Identity(
        "router", tls=Certificates(Path(link_folder(root, "router", "old")), "router")
    )
    async with (
        worker(tls["worker"]) as address,
        serve(registry, Changes(), "127.0.0.1:0", tls["operator"]) as control,
    ):
        with ControlClient(control, identity=tls["operator"]) as client:
            assert await answer(address, former) == await answer(address, tls["router"]) == "r"
            await asyncio.to_thread(client.set_replicas, "decode", 2)
            other = Authority(tmp_path, "other")
            for role in ROLES:
                link_folder(other, role)
            assert await answer(address, tls["router"]) == "r"
            await asyncio.to_thread(client.set_replicas, "decode", 3)
        with pytest.raises(OSError):
            await answer(address, former)
        assert await refusal(control, former, "WatchFleet")
    assert registry.pools.desired_replicas() == {"decode": 3}


@pytest.mark.parametrize("missing", ["ca.crt", "tls.crt", "tls.key"])
def test_files_that_are_missing_are_named(tmp_path: Path, missing: str) -> None:
    folder = Path(link_folder(Authority(tmp_path), "worker"))
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=r"internal\.folder: .*ca\.crt, tls\.crt, tls\.key") as e:
        Certificates(folder, "worker")
    assert e.value.field == "internal.folder"


# --- links ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
async def test_each_role_is_served_by_a_worker_what_it_may_ask_and_nothing_else(
    made: Callable[[Role], Identity], role: Role
) -> None:
    """Nothing is served here, and only who may ask learns of that."""
    port = WorkerPort({}, made("worker"), NAME)
    address = await port.start()
    for method in Method:
        with pytest.raises(LinkError) as ended:
            await ask_once(address, made(role), method, frames.MESSAGES[method][0](), 10.0, NAME)
        is_refused = ended.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert is_refused is (role not in frames.CALLERS[method]), method
    await port.stop()


@pytest.mark.parametrize("kind", ["keys", "tls", "tls at keys"])
async def test_a_stranger_is_refused_and_the_log_says_so_once(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It knows whom this cluster trusts, and has nothing that they trust."""
    ours, others = Authority(tmp_path / "ours"), Authority(tmp_path / "others")
    others.ca = ours.ca
    stranger = own("router") if kind == "keys" else certified(others, "router")
    of = partial(certified, ours) if kind == "tls" else identity
    async with worker(of("worker")) as address:
        for _ in range(3):
            with pytest.raises((OSError, LinkError)):
                await answer(address, stranger)
        assert await answer(address, of("router")) == "r"
    (told,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert told.startswith("a link from 127.0.0.1 is refused: ")


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
        for _ in range(2):
            reader, writer = await asyncio.open_connection(*address.split(":"))
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
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "is longer than 1024"),  # gRPC's first bytes
    ],
)
async def test_nothing_is_taken_before_it_is_known_who_calls(
    first: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with worker() as address:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(first)
        assert why.encode() in await asyncio.wait_for(reader.read(), 10)
        writer.close()
    assert why in caplog.text


async def test_a_connection_that_says_nothing_is_closed_at_the_end(
    made: Callable[[Role], Identity],
) -> None:
    async with worker(made("worker")) as address:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        assert await answer(address, made("router")) == "r"
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()


# --- the control service --------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
async def test_each_role_makes_its_own_calls_of_the_control_service_alone(
    made: Callable[[Role], Identity], role: Role
) -> None:
    async with serve(make_registry(), Changes(), "127.0.0.1:0", made("operator")) as address:
        for name in SERVICE.methods_by_name:
            wrong = f"PERMISSION_DENIED: the caller is {role}, and {name} is for "
            said = await refusal(address, made(role), name)
            assert said == "" if role in CALLERS[name] else said.startswith(wrong)


SET, REMOVE = (f"/baton.v1.ControlService/{name}" for name in ("SetReplicas", "RemovePool"))
BODY = control_pb2.SetReplicasRequest(pool="decode", replicas=2).SerializeToString()


async def test_what_was_recorded_or_is_dated_wrong_is_refused_also_after_a_restart() -> None:
    keys, registry = OPERATOR.keys, make_registry()
    assert keys is not None

    async def send(address: str, metadata: Any, path: str = SET, body: bytes = BODY) -> str:
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(address, options) as channel:
            try:
                await channel.unary_unary(path, bytes, bytes)(body, metadata=metadata, timeout=10)
            except grpc.aio.AioRpcError as error:
                return error.details() or ""
        return "taken"

    async with serve(registry, Changes(), "127.0.0.1:0", OPERATOR) as address:
        recorded, _ = signed_metadata(keys, SET, BODY, time.time_ns())
        unsigned = "it is not signed with a key of this cluster"
        assert await send(address, recorded, REMOVE) == unsigned
        assert await send(address, recorded, body=b"") == unsigned
        assert await send(address, recorded) == "taken"
        assert await send(address, recorded) == "it was taken before: a call counts once"
        for off_s in (WINDOW_S + 30, -WINDOW_S - 30):
            there_ns = time.time_ns() + int(off_s * 1e9)
            said = await send(address, signed_metadata(keys, SET, BODY, there_ns)[0])
            assert f"dated {round(off_s):+d} s from the control service's clock" in said
            assert "set the clocks" in said
    async with serve(make_registry(), Changes(), address, OPERATOR):
        said = await send(address, recorded)
        assert said == "it is dated before the control service's start: call again"
    assert registry.pools.desired_replicas() == {"decode": 2}


async def test_who_says_nothing_of_itself_may_send_little() -> None:
    async with (
        serve(make_registry(), Changes(), "127.0.0.1:0", OPERATOR) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = control_pb2_grpc.ControlServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.AddPool(control_pb2.AddPoolRequest(config="x" * (2 << 20)), timeout=10)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_calls_are_remembered_for_as_long_as_they_could_come_again() -> None:
    now_s = 1000.0
    guard = ControlGuard(OPERATOR, CALLERS, lambda: now_s)
    for count in range(100):
        now_s += WINDOW_S / 10
        guard._remember(int(now_s * 1e9), b"%d" % count)
    assert len(guard._nonces) <= 2 * 10 + 1
    with pytest.raises(UnauthenticatedError, match="taken before"):
        guard._remember(int(now_s * 1e9), b"99")


class Impostor(control_pb2_grpc.ControlServiceServicer):
    async def WatchFleet(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        yield control_pb2.WatchFleetResponse(version=1)

    async def SetReplicas(self, request: Any, context: Any) -> Any:  # noqa: N802
        return control_pb2.SetReplicasResponse()


@pytest.mark.parametrize("theirs", [Identity("operator"), own("operator")])
async def test_answers_of_another_service_are_believed_by_nobody(theirs: Identity) -> None:
    server = control_server(theirs)
    control_pb2_grpc.add_ControlServiceServicer_to_server(Impostor(), server)
    address = f"127.0.0.1:{listen_at(server, '127.0.0.1:0', theirs)}"
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = control_stub(channel, ROUTER)
        watch = stub.WatchFleet(control_pb2.WatchFleetRequest(), timeout=10)
        assert await anext(aiter(watch)) is None  # which ends it for a router
        watch.cancel()
    with (
        ControlClient(address, identity=OPERATOR) as control,
        pytest.raises(UnauthenticatedError, match="does not prove that it is this cluster's"),
    ):
        await asyncio.to_thread(control.set_replicas, "decode", 2)
    await server.stop(None)
