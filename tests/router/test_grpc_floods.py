"""Clients that flood the door's gRPC server, and what it takes of them at most."""

from __future__ import annotations

import asyncio
import errno
import gzip
import socket
import struct
import tracemalloc
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from h2.errors import ErrorCodes
from h2.events import DataReceived, ResponseReceived
from h2.settings import SettingCodes

from baton.v1 import router_pb2
from bench.floods import FLOODS, PREFACE
from tests.router.answers import error_of
from tests.router.grpc_served import (
    FOUR,
    RawClient,
    Served,
    asked,
    channel_to,
    framed,
    framed_text,
    served,
    stub_of,
    tokenize,
)


async def test_a_flood_of_resets_ends_the_connection_and_no_other() -> None:
    async with asked() as (made, stub):
        async with RawClient.to(made.address) as client:
            for _ in range(1500):
                stream = client.begin()
                client.h2.reset_stream(stream)
                client.flush()
            assert await client.cut_off() == ErrorCodes.ENHANCE_YOUR_CALM
        assert (await stub.Tokenize(tokenize("four"))).ids == [4]


async def test_clients_that_leave_answers_half_read_are_no_flood() -> None:
    async with served() as made, RawClient.to(made.address) as client:
        client.h2.increment_flow_control_window(1 << 30)
        for number in range(1500):
            stream = client.ask()
            await made.until(lambda n=number: len(made.service.feeds) > n)
            made.service.feeds[-1].put(1)
            await client.until(lambda s=stream: bool(client.data(s)))
            client.events.clear()
            client.h2.reset_stream(stream)
            client.flush()
        assert made.server.connections


FRAMES = {kind: again for kind, (first, again) in FLOODS.items() if first.startswith(PREFACE)} | {
    "SETTINGS": b"\0\0\0\x04\0\0\0\0\0",
    "PRIORITY": b"\0\0\x05\x02\0\0\0\0\x09\0\0\0\0\0",
}


@pytest.mark.parametrize("kind", FRAMES)
async def test_frames_that_serve_no_call_end_the_connection_and_no_other(kind: str) -> None:
    frame = FRAMES[kind]
    async with served() as made, RawClient.to(made.address) as client:
        client.h2.reset_stream(client.begin())
        client.flush()
        client.send(frame * 1000)  # a burst is welcome
        await made.until(lambda: all(one.is_idle for one in made.server.connections))
        assert len(made.server.connections) == 1
        client.send(frame * 20_000)
        # What it still sends may make the system cut the connection before it has heard why.
        assert await client.cut_off() in (None, ErrorCodes.ENHANCE_YOUR_CALM)


async def test_settings_that_nobody_knows_are_not_kept() -> None:
    async with served() as made, RawClient.to(made.address) as client:
        tracemalloc.start()
        for start in range(1000, 11_000, 170):
            body = b"".join(struct.pack(">HI", start + index, 1) for index in range(170))
            client.send(len(body).to_bytes(3, "big") + b"\x04\0\0\0\0\0" + body)
        assert (await client.ended(client.ask(b"Tokenize", FOUR)))["grpc-status"] == "0"
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert kept < 3 << 20  # they would be 8 MB
        client.send(b"\0\x10\0\x04\0\0\0\0\0" + bytes(4096))
        assert await client.cut_off() == ErrorCodes.ENHANCE_YOUR_CALM


async def test_refused_calls_fill_no_table_and_earn_no_allowance() -> None:
    async with served() as made, RawClient.to(made.address) as client:
        client.h2.update_settings({SettingCodes.HEADER_TABLE_SIZE: 1 << 31})
        for number in range(1000):  # each is refused in other words
            headers = await client.ended(client.begin(grpc_encoding=b"x%d" % number))
            assert headers["grpc-status"] == "12"
            client.events.clear()
        assert client.h2.decoder.header_table_size == 4096  # the server's has the same
        client.send(FRAMES["PING"] * 6000)
        assert await client.cut_off() in (None, ErrorCodes.ENHANCE_YOUR_CALM)


async def test_who_is_sent_much_may_have_much_to_say_of_it() -> None:
    async with served() as made, RawClient.to(made.address) as client:
        stream = client.ask()
        feed = await made.feed()
        for token in range(2000):
            feed.put(token)
            await client.until(lambda: bool(client.of(DataReceived)))
            client.events.clear()
            client.send(FRAMES["WINDOW_UPDATE"] * 2)
        feed.end()
        assert (await client.ended(stream))["grpc-status"] == "0"


def held(made: Served) -> int:
    return made.server.sharing.unfinished.num_bytes


LONG, PACKED = framed_text("x" * 40_000), gzip.compress(tokenize("x" * 32_000).SerializeToString())


@pytest.mark.parametrize(
    ("encoding", "begun", "rest"),
    [
        (b"identity", (LONG[:16_000], LONG[16_000:32_000]), LONG[32_000:]),
        (b"gzip", (framed(PACKED, flag=1),), b""),  # it counts as long as it is inflated
    ],
)
async def test_messages_that_never_end_give_way_the_oldest_first(
    encoding: bytes, begun: tuple[bytes, ...], rest: bytes
) -> None:
    async with asked(max_unfinished_bytes=110_000) as (made, stub):
        async with RawClient.to(made.address) as client:
            streams = [client.begin(grpc_encoding=encoding) for _ in range(3)]
            for stream in streams:
                for data in begun:
                    client.h2.send_data(stream, data)
                client.flush()
                await made.until(lambda n=stream: held(made) >= 16_000 * n)  # streams 1, 3, 5
            assert (await stub.Tokenize(tokenize("x" * 40_000))).ids == [40_000]
            headers = await client.ended(streams[0])
            assert headers["grpc-status"] == "8"
            assert "began first" in headers["grpc-message"]
            for stream in streams[1:]:
                client.h2.send_data(stream, rest, end_stream=True)
            client.flush()
            for stream in streams[1:]:
                assert (await client.ended(stream))["grpc-status"] == "0"
        assert held(made) == 0


def serve_health(made: Served) -> None:
    server: Any = made.server
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)


async def test_health_takes_short_messages_alone() -> None:
    async with served() as made, channel_to(made) as channel:
        serve_health(made)
        stub: Any = health_pb2_grpc.HealthStub(channel)
        long, short = (health_pb2.HealthCheckRequest(service="x" * n) for n in (1022, 1021))
        for call in (stub.Check(long), stub.Watch(long).read()):
            error = await error_of(call)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert error.details() == "Received message larger than max (1025 vs. 1024)"
        assert (await error_of(stub.Check(short))).code() is grpc.StatusCode.NOT_FOUND
        assert (await stub_of(channel).Tokenize(tokenize("x" * 2000))).ids == [2000]


async def test_a_frame_that_is_too_long_is_refused_by_its_head() -> None:
    async with served() as made, RawClient.to(made.address) as client:
        client.send(b"\xff\xff\xff\0\0\0\0\0\1")
        assert await client.cut_off() == ErrorCodes.FRAME_SIZE_ERROR


async def test_a_full_house_takes_a_new_client_for_an_idle_one_and_never_for_a_served_one() -> None:
    async with asked(max_connections=2) as (made, stub):
        call = stub.Generate(router_pb2.GenerateRequest())
        feed = await made.feed()
        async with RawClient.to(made.address) as idle, RawClient.to(made.address) as other:
            assert await idle.cut_off() == ErrorCodes.NO_ERROR
            other.ask()
            await made.until(lambda: len(made.service.feeds) == 2)
            reader, writer = await asyncio.open_connection(*made.address.split(":"))
            assert await reader.read() == b""
            writer.close()
        feed.put(1)
        assert (await call.read()).tokens.ids == [1]


async def test_in_a_full_house_health_keeps_no_client_in_and_puts_none_out() -> None:
    async with served(max_connections=2) as made, channel_to(made) as channel:
        serve_health(made)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()  # older than what it is served
        call = stub_of(channel).Generate(router_pb2.GenerateRequest())
        feed = await made.feed()
        for method in (b"Watch", b"Check"):
            async with RawClient.to(made.address, window=0) as held:
                held.ask(__path=b"/grpc.health.v1.Health/" + method)
                await held.until(lambda: bool(held.of(ResponseReceived)))
                async with RawClient.to(made.address):
                    assert await held.cut_off() == ErrorCodes.NO_ERROR
        feed.put(1)
        assert (await call.read()).tokens.ids == [1]


async def test_a_client_for_whom_no_file_is_left_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(_: socket.socket) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    async with served(max_connections=1) as made:
        with monkeypatch.context() as patched:
            patched.setattr(socket.socket, "dup", none_left)
            reader, writer = await asyncio.open_connection(*made.address.split(":"))
            assert await reader.read() == b""
            writer.close()
        assert not made.server.sharing._guests
        async with RawClient.to(made.address):
            assert len(made.server.connections) == 1


async def test_headers_are_limited() -> None:
    async with asked() as (made, stub):
        metadata = (("big", "x" * 30_000),)
        error = await error_of(stub.Tokenize(tokenize("four"), metadata=metadata))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "metadata" in (error.details() or "")
        async with RawClient.to(made.address) as client:
            client.begin(big=b"x" * 100_000)
            assert await client.cut_off() == ErrorCodes.ENHANCE_YOUR_CALM
        async with RawClient.to(made.address) as client:
            client.send(b"\0\0\x01\x01\0\0\0\0\x01\x00" + b"\0\0\x01\x09\0\0\0\0\x01\x00" * 100)
            assert await client.cut_off() == ErrorCodes.PROTOCOL_ERROR
        assert (await stub.Tokenize(tokenize("four"))).ids == [4]


async def test_more_streams_than_announced_end_the_connection() -> None:
    async with served() as made, RawClient.to(made.address) as client:
        for _ in range(client.h2.remote_settings.max_concurrent_streams):
            client.begin()
        client.h2.remote_settings.max_concurrent_streams = 1 << 20
        client.h2.remote_settings.acknowledge()
        client.begin()
        assert await client.cut_off() == ErrorCodes.PROTOCOL_ERROR
