"""Who may call the control service, by keys and by TLS, and who believes its answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message

from baton.control_client import ControlClient
from baton.errors import BatonError, PermissionDeniedError, UnauthenticatedError, UnavailableError
from baton.grpc_options import DIRECT
from baton.identity.control_calls import (
    WINDOW_S,
    ControlGuard,
    control_channel,
    control_stub,
    signed_metadata,
)
from baton.identity.identity import Identity
from baton.identity.keys import ROLES, Role
from baton.status import from_rpc_error
from baton.v1 import control_pb2, control_pb2_grpc
from cluster.registry.control_access import CALLERS, control_server, listen_at
from cluster.registry.control_service import Changes, serve
from tests.certificates import Authority, certified, link_folder, swap
from tests.cluster.attacker import CUT_SHORT, own
from tests.cluster.test_control_service import make_registry
from tests.identities import OPERATOR, ROUTER, identity

_SERVICE = control_pb2.DESCRIPTOR.services_by_name["ControlService"]


@pytest.fixture(params=["keys", "tls"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Role], Identity]:
    authority = Authority(tmp_path)
    return identity if request.param == "keys" else lambda role: certified(authority, role)


@contextlib.asynccontextmanager
async def called_by(address: str, own: Identity) -> AsyncIterator[Any]:
    options = (("grpc.use_local_subchannel_pool", 1), *DIRECT)
    async with control_channel(grpc.aio, address, options, own) as channel:
        yield control_stub(channel, own)


async def refusal(stub: Any, name: str) -> BatonError | None:
    """Why a call is refused as one of somebody else; None: it is taken."""
    method = _SERVICE.methods_by_name[name]
    request = getattr(control_pb2, method.input_type.name)()

    async def requests() -> AsyncIterator[Message]:
        yield request

    call = getattr(stub, name)(requests() if method.client_streaming else request, timeout=10)
    try:
        await (anext(aiter(call)) if method.server_streaming else call)
    except grpc.aio.AioRpcError as error:
        if error.code() in CUT_SHORT:
            return await refusal(stub, name)
        refused = from_rpc_error(error)
        kinds = UnauthenticatedError | PermissionDeniedError | UnavailableError
        return refused if isinstance(refused, kinds) else None
    finally:
        call.cancel()
    return None


def test_every_call_says_who_may_make_it() -> None:
    assert set(CALLERS) == {method.name for method in _SERVICE.methods}
    assert all(callers and callers <= set(ROLES) for callers in CALLERS.values())


@pytest.mark.parametrize("role", ROLES)
async def test_each_role_makes_its_own_calls_alone(
    made: Callable[[Role], Identity], role: Role
) -> None:
    async with (
        serve(make_registry(), Changes(), "127.0.0.1:0", made("operator")) as address,
        called_by(address, made(role)) as stub,
    ):
        for name, callers in CALLERS.items():
            refused = await refusal(stub, name)
            assert (refused is None) is (role in callers), (name, refused)
            if refused is not None:
                assert isinstance(refused, PermissionDeniedError)
                assert refused.message.startswith(f"the caller is {role}, and {name} is for ")


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
        assert await send(address, None) == unsigned
        assert await send(address, recorded) == "taken"
        assert await send(address, recorded) == "it was made before"
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
    with pytest.raises(UnauthenticatedError, match="made before"):
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
    async with called_by(address, ROUTER) as stub:
        watch = stub.WatchFleet(control_pb2.WatchFleetRequest(), timeout=10)
        assert await anext(aiter(watch)) is None  # which ends it for a router
        watch.cancel()
    with (
        ControlClient(address, identity=OPERATOR) as control,
        pytest.raises(UnauthenticatedError, match="does not prove that it is this cluster's"),
    ):
        await asyncio.to_thread(control.set_replicas, "decode", 2)
    await server.stop(None)


async def test_changed_certificates_count_at_both_sides(tmp_path: Path) -> None:
    root, other = Authority(tmp_path), Authority(tmp_path / "other", "other")
    own, registry = certified(root, "operator"), make_registry()
    async with serve(registry, Changes(), "127.0.0.1:0", own) as address:
        with ControlClient(address, identity=own) as client:
            await asyncio.to_thread(client.set_replicas, "decode", 2)
            moved = Path(link_folder(other, "operator"))
            for name in ("ca.crt", "tls.crt", "tls.key"):
                swap(tmp_path / "operator" / name, (moved / name).read_bytes())
            await asyncio.to_thread(client.set_replicas, "decode", 3)
        async with called_by(address, certified(root, "router")) as stub:
            assert await refusal(stub, "WatchFleet") is not None
    assert registry.pools.desired_replicas() == {"decode": 3}
