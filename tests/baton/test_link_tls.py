"""TLS on the link: each side shows its role, and nobody else is served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton.errors import ConfigError
from baton.link.frames import Method
from baton.link.router_end import Link
from baton.link.tls import LinkTls
from baton.link.worker_end import CallContext, answers
from baton.v1 import worker_pb2
from tests.certificates import Authority, link_folder, swap
from tests.link_stub import WorkerPort

ASK = worker_pb2.AttachRequest(request_id="r")


async def attached(
    request: worker_pb2.AttachRequest, context: CallContext
) -> worker_pb2.AttachResponse:
    return worker_pb2.AttachResponse(spec=worker_pb2.RequestSpec(request_id=request.request_id))


@asynccontextmanager
async def worker(tls: LinkTls) -> AsyncIterator[str]:
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = WorkerPort(server, {Method.ATTACH: answers(attached)}, tls)
    try:
        yield await port.start()
    finally:
        await port.stop()


async def answer(address: str, tls: LinkTls | None) -> str:
    """What a worker says to a router. Raises OSError, TimeoutError."""
    link = await Link.connect(address, keepalive_s=5.0, timeout_s=10.0, tls=tls)
    try:
        response = await link.ask(Method.ATTACH, ASK, 10.0)
        return str(response.spec.request_id)
    finally:
        link.close("asked")


async def test_a_router_is_served_and_health_needs_no_certificate(tmp_path: Path) -> None:
    root = Authority(tmp_path)
    async with worker(LinkTls(link_folder(root, "worker"), "worker")) as address:
        assert await answer(address, LinkTls(link_folder(root, "router"), "router")) == "r"
        async with grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            served = await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
            assert served.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("who", ["nobody", "a worker", "a stranger's router"])
async def test_nobody_else_is_served(tmp_path: Path, who: str) -> None:
    root, stranger = Authority(tmp_path), Authority(tmp_path / "stranger", "stranger")
    async with worker(LinkTls(link_folder(root, "worker"), "worker")) as address:
        tls = {
            "nobody": None,
            "a worker": LinkTls(link_folder(root, "worker", "other"), "router"),
            "a stranger's router": LinkTls(link_folder(stranger, "router"), "router"),
        }[who]
        with pytest.raises(OSError):
            await answer(address, tls)
        assert await answer(address, LinkTls(link_folder(root, "router"), "router")) == "r"


async def test_a_router_leaves_who_is_no_worker(tmp_path: Path) -> None:
    root = Authority(tmp_path)
    async with worker(LinkTls(link_folder(root, "router", "posing"), "worker")) as address:
        with pytest.raises(ConnectionResetError, match="does not name baton:worker"):
            await answer(address, LinkTls(link_folder(root, "router"), "router"))


async def test_changed_files_count_for_the_next_connection(tmp_path: Path) -> None:
    root, other = Authority(tmp_path), Authority(tmp_path / "other", "other")
    tls = LinkTls(link_folder(root, "worker"), "worker")
    router = LinkTls(link_folder(root, "router"), "router")
    async with worker(tls) as address:
        assert await answer(address, router) == "r"
        for role in ("worker", "router"):
            moved = Path(link_folder(other, role))
            for name in ("ca.crt", "tls.crt", "tls.key"):
                swap(tmp_path / role / name, (moved / name).read_bytes())
        assert await answer(address, router) == "r"
        old = LinkTls(link_folder(root, "router", "old"), "router")
        with pytest.raises(OSError):
            await answer(address, old)


async def test_a_connection_that_says_nothing_is_closed_at_the_end(tmp_path: Path) -> None:
    root = Authority(tmp_path)
    async with worker(LinkTls(link_folder(root, "worker"), "worker")) as address:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await answer(address, LinkTls(link_folder(root, "router"), "router")) == "r"
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()


@pytest.mark.parametrize("missing", ["ca.crt", "tls.crt", "tls.key"])
def test_files_that_are_missing_are_named(tmp_path: Path, missing: str) -> None:
    folder = Path(link_folder(Authority(tmp_path), "worker"))
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=r"worker\.link_tls: .*ca\.crt, tls\.crt, tls\.key") as e:
        LinkTls(str(folder), "worker")
    assert e.value.field == "worker.link_tls"
