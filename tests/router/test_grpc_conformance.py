"""The door's gRPC server against grpcio's own clients, and against clients that break the rules."""

from __future__ import annotations

import asyncio
import errno
import gzip
import socket
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import uvloop
from google.protobuf import descriptor_pool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from h2.errors import ErrorCodes
from h2.events import DataReceived, PingReceived, ResponseReceived, StreamReset
from h2.settings import SettingCodes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.client import AsyncClient
from baton.client.credentials import Tls
from baton.errors import BatonError, InvalidRequestError, OverloadedError
from baton.status import from_rpc_error
from baton.v1 import router_pb2, router_pb2_grpc
from router.door import access
from router.door.grpc_call import metadata_of
from tests.certificates import Authority, swap
from tests.router.answers import PROMPT, ask_for, assert_whole, error_of
from tests.router.deployment import deployment
from tests.router.grpc_served import MAX_BYTES, RawClient, Served, framed, served

GZIP = grpc.Compression.Gzip


def stub_of(channel: Any) -> Any:
    return router_pb2_grpc.RouterServiceStub(channel)


def tokenize(text: str) -> router_pb2.TokenizeRequest:
    return router_pb2.TokenizeRequest(text=text)


def channel_to(made: Served, **options: int) -> grpc.aio.Channel:
    chosen = [(f"grpc.{name}", value) for name, value in options.items()]
    return grpc.aio.insecure_channel(
        made.address, options=[("grpc.use_local_subchannel_pool", 1), *chosen]
    )


# --- what calls are -------------------------------------------------------------------------------


async def test_answers_and_streams_reach_the_asyncio_client() -> None:
    async with served() as made, channel_to(made) as channel:
        stub = stub_of(channel)
        assert (await stub.Tokenize(tokenize("four"))).ids == [4]
        fleets = stub.WatchFleet(router_pb2.RouterServiceWatchFleetRequest())
        assert len([fleet async for fleet in fleets]) == 3
        call = stub.Generate(router_pb2.GenerateRequest())
        await made.until(lambda: bool(made.service.feeds))
        feed = made.service.feeds[0]
        for token in range(5):
            feed.put(token)
            assert (await call.read()).tokens.ids == [token]
        feed.put(5, 6)
        feed.end()
        assert (await call.read()).tokens.ids == [5, 6]
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        assert feed.is_left


async def test_answers_and_streams_reach_the_blocking_client() -> None:
    async with served() as made:

        def ask() -> None:
            with grpc.insecure_channel(made.address) as channel:
                stub = stub_of(channel)
                assert stub.Tokenize(tokenize("four"), timeout=10).ids == [4]
                fleets = stub.WatchFleet(router_pb2.RouterServiceWatchFleetRequest(), timeout=10)
                assert len(list(fleets)) == 3
                assert fleets.code() is grpc.StatusCode.OK
                with pytest.raises(grpc.RpcError) as caught:
                    stub.Tokenize(tokenize("wait"), timeout=0.1)
                failed: Any = caught.value
                assert failed.code() is grpc.StatusCode.DEADLINE_EXCEEDED

        await asyncio.to_thread(ask)
        await made.until(lambda: made.service.num_waiting == 0)


async def test_many_calls_share_a_connection() -> None:
    async with served() as made, channel_to(made) as channel:
        stub = stub_of(channel)
        answers = await asyncio.gather(*(stub.Tokenize(tokenize("x" * n)) for n in range(200)))
        assert [answer.ids[0] for answer in answers] == list(range(200))
        assert len(made.server.connections) == 1


async def test_errors_carry_their_details_in_the_trailers() -> None:
    async with served() as made, channel_to(made) as channel:
        stub = stub_of(channel)
        message = 'ünreadable: 100% "☃"\n' + "é" * 400
        error = from_rpc_error(await error_of(stub.Tokenize(tokenize(f"refuse {message}"))))
        assert isinstance(error, InvalidRequestError)
        assert error.field == "text"
        assert error.message == message.encode()[:500].decode(errors="ignore") + "..."
        shed = from_rpc_error(await error_of(stub.Tokenize(tokenize("shed"))))
        assert isinstance(shed, OverloadedError)
        assert shed.retry_after_s == 2.5


async def test_a_method_that_fails_ends_its_own_call(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as made, channel_to(made) as channel:
        stub = stub_of(channel)
        error = await error_of(stub.Tokenize(tokenize("break")))
        assert error.code() is grpc.StatusCode.UNKNOWN
        assert "of the test" in (error.details() or "")
        assert "a method failed" in caplog.text
        assert (await stub.Tokenize(tokenize("four"))).ids == [4]


async def test_a_message_that_is_no_protobuf_is_refused() -> None:
    async with served() as made, channel_to(made) as channel:
        call: Any = channel.unary_unary("/baton.v1.RouterService/Tokenize")
        error = await error_of(call(b"\xff\xff\xff"))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        unknown: Any = channel.unary_unary("/baton.v1.RouterService/Nothing")
        assert (await error_of(unknown(b""))).code() is grpc.StatusCode.UNIMPLEMENTED


async def test_deadlines_end_calls_at_either_side() -> None:
    async with served() as made:
        async with channel_to(made) as channel:
            error = await error_of(stub_of(channel).Tokenize(tokenize("wait"), timeout=0.1))
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await made.until(lambda: made.service.num_waiting == 0)
        async with RawClient.to(made.address) as client:
            stream = client.begin(grpc_timeout=b"50m")
            data = framed(tokenize("wait").SerializeToString())
            client.h2.send_data(stream, data, end_stream=True)
            client.flush()
            assert (await client.ended(stream))["grpc-status"] == "4"
            assert made.service.num_waiting == 0
            late = client.begin(grpc_timeout=b"1u")  # before any of its request came
            assert (await client.ended(late))["grpc-status"] == "4"
            wrong = client.begin(grpc_timeout=b"soon")
            assert (await client.ended(wrong))["grpc-status"] == "13"


async def test_a_client_that_cancels_is_left_at_once() -> None:
    async with served() as made, channel_to(made) as channel:
        stub = stub_of(channel)
        call = stub.Generate(router_pb2.GenerateRequest())
        await made.until(lambda: bool(made.service.feeds))
        made.service.feeds[0].put(1)
        await call.read()
        call.cancel()
        waiting = stub.Tokenize(tokenize("wait"))
        await made.until(lambda: made.service.num_waiting == 1)
        waiting.cancel()
        await made.until(lambda: made.service.feeds[0].is_left and not made.service.num_waiting)


async def test_the_loss_of_a_connection_ends_its_calls() -> None:
    async with served() as made:
        async with RawClient.to(made.address) as client:
            stream = client.begin(b"Generate")
            client.h2.send_data(stream, framed(b""), end_stream=True)
            client.flush()
            await made.until(lambda: bool(made.service.feeds))
        await made.until(lambda: made.service.feeds[0].is_left)
        assert not made.server.connections


# --- messages -------------------------------------------------------------------------------------


async def test_messages_are_limited_both_ways() -> None:
    async with served() as made, channel_to(made) as channel:
        stub = stub_of(channel)
        for text in ("x" * MAX_BYTES, f"answer {MAX_BYTES}"):
            error = await error_of(stub.Tokenize(tokenize(text)))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert f"larger than max ({MAX_BYTES}" not in (error.details() or "")
            assert f"vs. {MAX_BYTES})" in (error.details() or "")
        length = MAX_BYTES - 100
        assert (await stub.Tokenize(tokenize("x" * length))).ids == [length]


async def test_a_long_message_is_refused_by_its_prefix() -> None:
    async with served() as made, RawClient.to(made.address) as client:
        stream = client.begin()
        client.h2.send_data(stream, struct.pack(">BI", 0, 1 << 30))
        client.flush()
        assert (await client.ended(stream))["grpc-status"] == "8"
        await client.until(lambda: bool(client.of(StreamReset, stream)))  # it need not go on
        other = client.begin()
        data = framed(tokenize("four").SerializeToString())
        client.h2.send_data(other, data, end_stream=True)
        client.flush()
        assert (await client.ended(other))["grpc-status"] == "0"


async def test_a_message_may_come_in_any_pieces() -> None:
    async with served() as made, RawClient.to(made.address) as client:
        stream = client.begin()
        for byte in framed(tokenize("four").SerializeToString()):
            client.h2.send_data(stream, bytes((byte,)), pad_length=3)
        client.h2.end_stream(stream)
        client.flush()
        assert (await client.ended(stream))["grpc-status"] == "0"
        assert client.data(stream) == framed(
            router_pb2.TokenizeResponse(ids=[4]).SerializeToString()
        )


async def test_requests_that_are_cut_off_or_too_many_are_refused() -> None:
    message = framed(tokenize("four").SerializeToString())
    async with served() as made, RawClient.to(made.address) as client:
        for data in (b"", message[:3], message[:-1], message + message, b"\x02" + message[1:]):
            stream = client.begin()
            client.h2.send_data(stream, data, end_stream=True)
            client.flush()
            assert (await client.ended(stream))["grpc-status"] == "13", data


async def test_requests_may_be_compressed_and_bombs_are_refused() -> None:
    async with served() as made, channel_to(made) as channel:
        stub = stub_of(channel)
        for how in (GZIP, grpc.Compression.Deflate):
            answer = await stub.Tokenize(tokenize("x" * 5000), compression=how)
            assert answer.ids == [5000]
        error = await error_of(stub.Tokenize(tokenize("x" * (1 << 20)), compression=GZIP))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with RawClient.to(made.address) as client:
            for encoding, packed, status in (
                (b"gzip", gzip.compress(b"")[:-4], "13"),
                (b"gzip", b"nonsense", "13"),
                (b"identity", gzip.compress(b""), "13"),
                (b"snappy", b"", "12"),
            ):
                stream = client.begin(grpc_encoding=encoding)
                client.h2.send_data(stream, framed(packed, flag=1), end_stream=True)
                client.flush()
                headers = await client.ended(stream)
                assert headers["grpc-status"] == status
                assert headers["grpc-accept-encoding"] == "identity, deflate, gzip"


async def test_what_is_no_grpc_is_refused_in_http() -> None:
    async with served() as made, RawClient.to(made.address) as client:
        for headers, status in (
            ({"content_type": b"text/plain"}, "415"),
            ({"__method": b"GET"}, "405"),
        ):
            stream = client.begin(**headers)
            assert (await client.ended(stream))[":status"] == status
        assert (await client.ended(client.begin(__path=b"/nowhere")))["grpc-status"] == "12"


def test_binary_metadata_are_decoded_with_or_without_padding() -> None:
    headers = [(b"a-bin", b"AAE"), (b"b-bin", b"AAE=,Ag=="), (b"c", b"x"), (b"grpc-timeout", b"1S")]
    assert list(metadata_of([*headers, (b"d-bin", b"A")])) == [
        ("a-bin", b"\0\1"),
        ("b-bin", b"\0\1"),
        ("b-bin", b"\2"),
        ("c", "x"),
    ]


# --- flow control ---------------------------------------------------------------------------------


async def test_a_reader_that_stalls_costs_no_memory_and_gets_everything_in_the_end() -> None:
    num_tokens = 200_000
    async with served(max_message_bytes=8 << 20) as made:
        client_at = RawClient.to(made.address, window=100)
        async with client_at as client:
            stream = client.begin(b"Generate")
            client.h2.send_data(stream, framed(b""), end_stream=True)
            client.flush()
            await made.until(lambda: bool(made.service.feeds))
            feed = made.service.feeds[0]
            tracemalloc.start()
            for token in range(num_tokens):
                feed.put(token % 128)
                if token % 1000 == 0:
                    await asyncio.sleep(0)
            kept, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert feed.num_takes < 30  # the rest stays where it is
            assert kept < 3 << 20  # the feed's own list
            feed.end()
            client.h2.increment_flow_control_window(1 << 30)
            client.h2.increment_flow_control_window(1 << 30, stream)
            client.flush()
            assert (await client.ended(stream))["grpc-status"] == "0"
            ids: list[int] = []
            for message in messages_in(client.data(stream)):
                ids += router_pb2.GenerateResponse.FromString(message).tokens.ids
            assert ids == [token % 128 for token in range(num_tokens)]


def messages_in(data: bytes) -> Iterator[bytes]:
    while data:
        _, length = struct.unpack_from(">BI", data)
        yield data[5 : 5 + length]
        data = data[5 + length :]


async def test_one_stalled_call_does_not_hold_up_the_others() -> None:
    async with served() as made, channel_to(made) as channel:
        stub = stub_of(channel)
        call = stub.Generate(router_pb2.GenerateRequest())
        await made.until(lambda: bool(made.service.feeds))
        feed = made.service.feeds[0]
        for token in range(50_000):
            feed.put(token)
            if token % 500 == 0:
                await asyncio.sleep(0)
        assert (await stub.Tokenize(tokenize("four"))).ids == [4]
        feed.end()
        ids = [id_ async for response in call for id_ in response.tokens.ids]
        assert ids == list(range(50_000))


async def test_a_long_answer_passes_a_small_window() -> None:
    async with served(max_message_bytes=8 << 20) as made, channel_to(made) as channel:
        answer = await stub_of(channel).Tokenize(tokenize("answer 1000000"))
        assert len(answer.ids) == 1_000_000


# --- pings ----------------------------------------------------------------------------------------


async def test_a_client_that_pings_while_it_is_sent_tokens_is_welcome() -> None:
    async with served() as made, RawClient.to(made.address) as client:
        stream = client.begin(b"Generate")
        client.h2.send_data(stream, framed(b""), end_stream=True)
        client.flush()
        await made.until(lambda: bool(made.service.feeds))
        feed = made.service.feeds[0]
        for token in range(10):
            feed.put(token)
            await client.until(lambda n=token: feed.num_takes > n)
            client.h2.ping(b"12345678")
            client.flush()
            await asyncio.sleep(0.01)
        feed.end()
        assert (await client.ended(stream))["grpc-status"] == "0"


async def test_grpcio_s_keepalive_is_answered() -> None:
    async with served() as made:
        often = {"keepalive_time_ms": 50, "http2.max_pings_without_data": 0}
        async with channel_to(made, keepalive_timeout_ms=2000, **often) as channel:
            call = stub_of(channel).Generate(router_pb2.GenerateRequest())
            await made.until(lambda: bool(made.service.feeds))
            await asyncio.sleep(0.5)
            made.service.feeds[0].put(1)
            assert (await call.read()).tokens.ids == [1]


async def test_a_silent_client_is_pinged_and_stays_only_if_it_answers() -> None:
    async with served(keepalive_s=0.05) as made:
        async with RawClient.to(made.address) as client:
            await client.until(lambda: len(client.of(PingReceived)) >= 4)
            assert len(made.server.connections) == 1
        await made.until(lambda: not made.server.connections)
        _, writer = await asyncio.open_connection(*made.address.split(":"))
        await made.until(lambda: len(made.server.connections) == 1)
        await made.until(lambda: not made.server.connections)
        writer.close()


# --- the end --------------------------------------------------------------------------------------


async def test_a_server_that_stops_finishes_what_runs_and_takes_nothing_new() -> None:
    async with served() as made, channel_to(made) as channel:
        stub = stub_of(channel)
        call = stub.Generate(router_pb2.GenerateRequest())
        await made.until(lambda: bool(made.service.feeds))
        stopping = asyncio.create_task(made.server.stop(10.0))
        await made.until(lambda: made.server.is_stopping)
        error = await error_of(stub.Tokenize(tokenize("four"), timeout=5))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        made.service.feeds[0].put(1, 2)
        made.service.feeds[0].end()
        assert (await call.read()).tokens.ids == [1, 2]
        assert await call.read() is grpc.aio.EOF
        await asyncio.wait_for(stopping, 5)


async def test_a_request_that_crosses_goaway_is_refused_so_that_it_may_go_elsewhere() -> None:
    async with served() as made, RawClient.to(made.address) as client:
        running = client.begin(b"Generate")
        client.h2.send_data(running, framed(b""), end_stream=True)
        client.flush()
        await made.until(lambda: bool(made.service.feeds))
        stopping = asyncio.create_task(made.server.stop(10.0))
        await asyncio.sleep(0)
        crossing = client.begin()  # it has not read GOAWAY
        client.h2.state_machine.process_input = lambda _: []  # type: ignore[method-assign]
        await client.until(lambda: bool(client.of(StreamReset, crossing)))
        assert client.of(StreamReset, crossing)[0].error_code == ErrorCodes.REFUSED_STREAM
        made.service.feeds[0].end()
        assert (await client.ended(running))["grpc-status"] == "0"
        await asyncio.wait_for(stopping, 5)


async def test_what_runs_longer_than_the_grace_is_ended_by_name() -> None:
    async with served() as made, channel_to(made) as channel:
        asking = asyncio.create_task(error_of(stub_of(channel).Tokenize(tokenize("wait"))))
        await made.until(lambda: made.service.num_waiting == 1)
        await made.server.stop(0.0)
        error = await asking
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error.details() == "the server shuts down"
        assert made.service.num_waiting == 0


# --- clients that break the rules -----------------------------------------------------------------


async def test_a_flood_of_resets_ends_the_connection_and_no_other() -> None:
    async with served() as made, channel_to(made) as channel:
        async with RawClient.to(made.address) as client:
            for _ in range(1500):
                stream = client.begin()
                client.h2.reset_stream(stream)
                client.flush()
            assert await client.cut_off() == ErrorCodes.ENHANCE_YOUR_CALM
        assert (await stub_of(channel).Tokenize(tokenize("four"))).ids == [4]


async def test_clients_that_leave_answers_half_read_are_no_flood() -> None:
    async with served() as made, RawClient.to(made.address) as client:
        client.h2.increment_flow_control_window(1 << 30)
        for number in range(1500):
            stream = client.begin(b"Generate")
            client.h2.send_data(stream, framed(b""), end_stream=True)
            client.flush()
            await made.until(lambda n=number: len(made.service.feeds) > n)
            made.service.feeds[-1].put(1)
            await client.until(lambda s=stream: bool(client.data(s)))
            client.events.clear()
            client.h2.reset_stream(stream)
            client.flush()
        assert made.server.connections


FLOODS = {  # frames that serve no call, from a client that had one that is closed
    "SETTINGS": b"\0\0\0\x04\0\0\0\0\0",
    "SETTINGS ack": b"\0\0\0\x04\x01\0\0\0\0",
    "PRIORITY": b"\0\0\x05\x02\0\0\0\0\x09\0\0\0\0\0",
    "PING": b"\0\0\x08\x06\0\0\0\0\0pingping",
    "PING ack": b"\0\0\x08\x06\x01\0\0\0\0pingping",
    "WINDOW_UPDATE": b"\0\0\x04\x08\0\0\0\0\0\0\0\0\x01",
    "unknown": b"\0\0\0\xfa\0\0\0\0\0",
    "DATA": b"\0\0\x01\0\0\0\0\0\x01x",
    "RST": b"\0\0\x04\x03\0\0\0\0\x01\0\0\0\x08",
}


@pytest.mark.parametrize("kind", FLOODS)
async def test_frames_that_serve_no_call_end_the_connection_and_no_other(kind: str) -> None:
    frame = FLOODS[kind]
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
        stream = client.begin()
        client.h2.send_data(stream, framed(tokenize("four").SerializeToString()), end_stream=True)
        client.flush()
        assert (await client.ended(stream))["grpc-status"] == "0"
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
        client.send(FLOODS["PING"] * 6000)
        assert await client.cut_off() in (None, ErrorCodes.ENHANCE_YOUR_CALM)


async def test_who_is_sent_much_may_have_much_to_say_of_it() -> None:
    async with served() as made, RawClient.to(made.address) as client:
        stream = client.begin(b"Generate")
        client.h2.send_data(stream, framed(b""), end_stream=True)
        client.flush()
        await made.until(lambda: bool(made.service.feeds))
        feed = made.service.feeds[0]
        for token in range(2000):
            feed.put(token)
            await client.until(lambda: bool(client.of(DataReceived)))
            client.events.clear()
            client.send(FLOODS["WINDOW_UPDATE"] * 2)
        feed.end()
        assert (await client.ended(stream))["grpc-status"] == "0"


async def test_messages_that_never_end_give_way_the_oldest_first() -> None:
    message = framed(tokenize("x" * 40_000).SerializeToString())
    async with served(max_unfinished_bytes=110_000) as made, channel_to(made) as channel:
        async with RawClient.to(made.address) as client:
            streams = [client.begin() for _ in range(3)]
            for stream in streams:
                client.h2.send_data(stream, message[:16_000])
                client.h2.send_data(stream, message[16_000:32_000])
                client.flush()
                await made.until(lambda n=stream: held(made) >= 16_000 * n)  # streams 1, 3, 5
            assert (await stub_of(channel).Tokenize(tokenize("x" * 40_000))).ids == [40_000]
            headers = await client.ended(streams[0])
            assert headers["grpc-status"] == "8"
            assert "began first" in headers["grpc-message"]
            for stream in streams[1:]:
                client.h2.send_data(stream, message[32_000:], end_stream=True)
            client.flush()
            for stream in streams[1:]:
                assert (await client.ended(stream))["grpc-status"] == "0"
        assert held(made) == 0


async def test_what_an_inflated_message_takes_is_counted() -> None:
    packed = framed(gzip.compress(tokenize("x" * 40_000).SerializeToString()), flag=1)
    async with served(max_unfinished_bytes=110_000) as made, RawClient.to(made.address) as client:
        streams = [client.begin(grpc_encoding=b"gzip") for _ in range(3)]
        for stream in streams:
            client.h2.send_data(stream, packed)
        client.flush()
        assert "began first" in (await client.ended(streams[0]))["grpc-message"]
        for stream in streams[1:]:
            client.h2.end_stream(stream)
        client.flush()
        for stream in streams[1:]:
            assert (await client.ended(stream))["grpc-status"] == "0"
        assert held(made) == 0


async def test_health_takes_short_messages_alone() -> None:
    async with served() as made, channel_to(made) as channel:
        methods: Any = made.server.methods
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), methods)
        stub: Any = health_pb2_grpc.HealthStub(channel)
        long, short = (health_pb2.HealthCheckRequest(service="x" * n) for n in (1022, 1021))
        for call in (stub.Check(long), stub.Watch(long).read()):
            error = await error_of(call)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert error.details() == "Received message larger than max (1025 vs. 1024)"
        assert (await error_of(stub.Check(short))).code() is grpc.StatusCode.NOT_FOUND
        assert (await stub_of(channel).Tokenize(tokenize("x" * 2000))).ids == [2000]


def held(made: Served) -> int:
    return made.server.sharing.unfinished.num_bytes


async def test_a_frame_that_is_too_long_is_refused_by_its_head() -> None:
    async with served() as made, RawClient.to(made.address) as client:
        client.send(b"\xff\xff\xff\0\0\0\0\0\1")
        assert await client.cut_off() == ErrorCodes.FRAME_SIZE_ERROR


async def test_a_full_house_takes_a_new_client_for_an_idle_one_and_never_for_a_served_one() -> None:
    async with served(max_connections=2) as made, channel_to(made) as channel:
        call = stub_of(channel).Generate(router_pb2.GenerateRequest())
        await made.until(lambda: bool(made.service.feeds))
        async with RawClient.to(made.address) as idle, RawClient.to(made.address) as other:
            assert await idle.cut_off() == ErrorCodes.NO_ERROR
            stream = other.begin(b"Generate")
            other.h2.send_data(stream, framed(b""), end_stream=True)
            other.flush()
            await made.until(lambda: len(made.service.feeds) == 2)
            reader, writer = await asyncio.open_connection(*made.address.split(":"))
            assert await reader.read() == b""
            writer.close()
        made.service.feeds[0].put(1)
        assert (await call.read()).tokens.ids == [1]


async def test_in_a_full_house_health_keeps_no_client_in_and_puts_none_out() -> None:
    async with served(max_connections=2) as made, channel_to(made) as channel:
        methods: Any = made.server.methods
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), methods)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()  # older than what it is served
        call = stub_of(channel).Generate(router_pb2.GenerateRequest())
        await made.until(lambda: bool(made.service.feeds))
        for method in (b"Watch", b"Check"):
            async with RawClient.to(made.address, window=0) as held:
                asked = held.begin(__path=b"/grpc.health.v1.Health/" + method)
                held.h2.send_data(asked, framed(b""), end_stream=True)
                held.flush()
                await held.until(lambda: bool(held.of(ResponseReceived, asked)))  # noqa: B023
                async with RawClient.to(made.address):
                    assert await held.cut_off() == ErrorCodes.NO_ERROR
        made.service.feeds[0].put(1)
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


async def test_answers_that_nobody_reads_are_not_kept() -> None:
    async with served() as made, RawClient.to(made.address) as client:
        asked = client.begin(b"Generate")
        client.h2.send_data(asked, framed(b""), end_stream=True)
        client.flush()
        await made.until(lambda: bool(made.service.feeds))
        async with asyncio.timeout(30):
            while made.server.connections:  # it is cut, or told to calm down
                client.send(b"\0\0\x08\x06\0\0\0\0\0pingping" * 1000)
                await asyncio.sleep(0)
        assert made.service.feeds[0].is_left


async def test_headers_are_limited() -> None:
    async with served() as made, channel_to(made) as channel:
        stub = stub_of(channel)
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


frames = st.builds(
    lambda kind, flags, stream, payload: (
        len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload
    ),
    st.integers(0, 12),
    st.sampled_from((0, 1, 4, 5, 8, 0x20, 0x2D, 0xFF)),
    st.sampled_from((0, 1, 1, 2, 3, 2**31)),
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from((b"\x83\x86\x84", b"\0" * 4, b"\0" * 5, b"\0" * 8, framed(b""))),
    ),
)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.lists(frames, max_size=8).map(lambda made: PREFACE + b"".join(made)),
        st.tuples(st.lists(frames, max_size=3), st.binary(max_size=50)).map(
            lambda made: PREFACE + b"".join(made[0]) + made[1]
        ),
    )
)
def test_whatever_a_client_sends_others_are_served(data: bytes) -> None:
    async def run() -> None:
        async with served() as made, RawClient.to(made.address) as good:
            _, writer = await asyncio.open_connection(*made.address.split(":"))
            writer.write(data)
            await writer.drain()
            stream = good.begin()
            good.h2.send_data(stream, framed(tokenize("four").SerializeToString()), end_stream=True)
            good.flush()
            assert (await good.ended(stream))["grpc-status"] == "0"
            await asyncio.sleep(0)
            writer.close()

    asyncio.run(run())


def test_certificates_are_asked_for_on_the_loop_that_routers_run_on(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    made = authority.issue("router")
    config = access.TlsConfig(str(made.certificate), str(made.key), str(authority.ca))
    ca, own = authority.ca.read_bytes(), (made.key.read_bytes(), made.certificate.read_bytes())

    async def run() -> None:
        async with served(access.read_certificates(config).of_grpc) as at:
            for shown in ((), own):
                credentials = grpc.ssl_channel_credentials(ca, *shown)
                async with grpc.aio.secure_channel(at.address, credentials) as channel:
                    call = stub_of(channel).Tokenize(tokenize("four"), timeout=20)
                    if shown:
                        assert (await call).ids == [4]
                    else:
                        assert (await error_of(call)).code() is grpc.StatusCode.UNAVAILABLE

    uvloop.run(run())


# --- the whole door -------------------------------------------------------------------------------


async def test_reflection_describes_the_service_to_who_knows_nothing_of_it() -> None:
    async with deployment() as d:

        def find() -> None:
            with grpc.insecure_channel(d.servers[0].address) as channel:
                database = ProtoReflectionDescriptorDatabase(channel)
                assert "grpc.health.v1.Health" in database.get_services()
                pool = descriptor_pool.DescriptorPool(database)
                service = pool.FindServiceByName("baton.v1.RouterService")
                assert "Generate" in service.methods_by_name

        await asyncio.to_thread(find)


async def test_a_client_that_reads_late_gets_every_token() -> None:
    async with deployment() as d:
        call = d.client.stub.Generate(ask_for(PROMPT, 200))
        await d.until(lambda: not d.router.num_active and bool(d.worker("d0").num_reserves))
        ids = [id_ async for response in call for id_ in response.tokens.ids]
        assert len(ids) == 200
        assert_whole(await d.client.ask(ask_for(PROMPT)), PROMPT)


async def test_the_authority_of_clients_is_replaced_while_the_router_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_LOOK_S", 0.01)
    authority, clients = Authority(tmp_path), Authority(tmp_path / "clients")
    made = authority.issue("router")
    tls = access.TlsConfig(str(made.certificate), str(made.key), str(clients.ca))
    async with deployment(tls=tls) as d:
        address = d.servers[0].address

        async def is_known(issuer: Authority) -> bool:
            own = issuer.issue("someone")
            shown = Tls(str(authority.ca), str(own.certificate), str(own.key))
            async with AsyncClient(address, tls=shown) as client:
                try:
                    return bool(await client.models())
                except BatonError:
                    return False

        successor = Authority(tmp_path / "successor")
        assert await is_known(clients)
        assert not await is_known(successor)
        swap(clients.ca, successor.ca.read_bytes())
        async with asyncio.timeout(10):
            while not await is_known(successor):
                continue
        assert not await is_known(clients)
