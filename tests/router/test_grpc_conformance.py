"""The door's gRPC server against grpcio's own clients, and against clients that break the rules."""

from __future__ import annotations

import asyncio
import gzip
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
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from h2.errors import ErrorCodes
from h2.events import PingAckReceived, PingReceived, StreamReset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.config.router import TlsConfig
from baton.errors import InvalidRequestError, OverloadedError
from baton.status import from_rpc_error
from baton.v1 import control_pb2, router_pb2
from router.door.connections.credentials import read_certificates
from tests.certificates import Authority
from tests.router.answers import error_of
from tests.router.deployment import deployment
from tests.router.grpc_served import (
    FOUR,
    MAX_BYTES,
    RawClient,
    asked,
    channel_to,
    framed,
    framed_text,
    served,
    stub_of,
    tokenize,
)

GZIP = grpc.Compression.Gzip


# --- what calls are -------------------------------------------------------------------------------


async def test_answers_and_streams_reach_the_asyncio_client() -> None:
    async with asked() as (made, stub):
        assert (await stub.Tokenize(tokenize("four"))).ids == [4]
        fleets = stub.WatchFleet(control_pb2.FleetServiceWatchFleetRequest())
        assert len([fleet async for fleet in fleets]) == 3
        call = stub.Generate(router_pb2.GenerateRequest())
        feed = await made.feed()
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
                fleets = stub.WatchFleet(control_pb2.FleetServiceWatchFleetRequest(), timeout=10)
                assert len(list(fleets)) == 3
                assert fleets.code() is grpc.StatusCode.OK
                with pytest.raises(grpc.RpcError) as caught:
                    stub.Tokenize(tokenize("wait"), timeout=0.1)
                failed: Any = caught.value
                assert failed.code() is grpc.StatusCode.DEADLINE_EXCEEDED

        await asyncio.to_thread(ask)
        await made.until(lambda: made.service.num_waiting == 0)


async def test_many_calls_share_a_connection() -> None:
    async with asked() as (made, stub):
        answers = await asyncio.gather(*(stub.Tokenize(tokenize("x" * n)) for n in range(200)))
        assert [answer.ids[0] for answer in answers] == list(range(200))
        assert len(made.server.connections) == 1


async def test_errors_carry_their_details_in_the_trailers() -> None:
    async with asked() as (_, stub):
        message = 'ünreadable: 100% "☃"\n' + "é" * 400
        error = from_rpc_error(await error_of(stub.Tokenize(tokenize(f"refuse {message}"))))
        assert isinstance(error, InvalidRequestError)
        assert error.field == "text"
        assert error.message == message.encode()[:500].decode(errors="ignore") + "..."
        shed = from_rpc_error(await error_of(stub.Tokenize(tokenize("shed"))))
        assert isinstance(shed, OverloadedError)
        assert shed.retry_after_s == 2.5


async def test_a_method_that_fails_ends_its_own_call(caplog: pytest.LogCaptureFixture) -> None:
    async with asked() as (_, stub):
        error = await error_of(stub.Tokenize(tokenize("break")))
        assert error.code() is grpc.StatusCode.UNKNOWN
        assert "of the test" in (error.details() or "")
        assert "a method failed" in caplog.text
        assert (await stub.Tokenize(tokenize("four"))).ids == [4]


async def test_deadlines_end_calls_at_either_side() -> None:
    async with served() as made:
        async with channel_to(made) as channel:
            error = await error_of(stub_of(channel).Tokenize(tokenize("wait"), timeout=0.1))
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await made.until(lambda: made.service.num_waiting == 0)
        async with RawClient.to(made.address) as client:
            stream = client.ask(b"Tokenize", framed_text("wait"), grpc_timeout=b"50m")
            assert (await client.ended(stream))["grpc-status"] == "4"
            assert made.service.num_waiting == 0
            late = client.begin(grpc_timeout=b"1u")  # before any of its request came
            assert (await client.ended(late))["grpc-status"] == "4"
            wrong = client.begin(grpc_timeout=b"soon")
            assert (await client.ended(wrong))["grpc-status"] == "13"


async def test_a_client_that_cancels_is_left_at_once() -> None:
    async with asked() as (made, stub):
        call = stub.Generate(router_pb2.GenerateRequest())
        feed = await made.feed()
        feed.put(1)
        await call.read()
        call.cancel()
        waiting = stub.Tokenize(tokenize("wait"))
        await made.until(lambda: made.service.num_waiting == 1)
        waiting.cancel()
        await made.until(lambda: feed.is_left and not made.service.num_waiting)


async def test_the_loss_of_a_connection_ends_its_calls() -> None:
    async with served() as made:
        async with RawClient.to(made.address) as client:
            client.ask()
            feed = await made.feed()
        await made.until(lambda: feed.is_left)
        assert not made.server.connections


# --- messages -------------------------------------------------------------------------------------


async def test_messages_are_limited_both_ways() -> None:
    async with asked() as (_, stub):
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
        assert (await client.ended(client.ask(b"Tokenize", FOUR)))["grpc-status"] == "0"


async def test_a_message_may_come_in_any_pieces() -> None:
    async with served() as made, RawClient.to(made.address) as client:
        stream = client.begin()
        for byte in FOUR:
            client.h2.send_data(stream, bytes((byte,)), pad_length=3)
        client.h2.end_stream(stream)
        client.flush()
        assert (await client.ended(stream))["grpc-status"] == "0"
        assert client.data(stream) == framed(
            router_pb2.TokenizeResponse(ids=[4]).SerializeToString()
        )


async def test_requests_that_are_cut_off_or_too_many_are_refused() -> None:
    async with served() as made, RawClient.to(made.address) as client:
        for data in (b"", FOUR[:3], FOUR[:-1], FOUR + FOUR, b"\x02" + FOUR[1:]):
            headers = await client.ended(client.ask(b"Tokenize", data))
            assert headers["grpc-status"] == "13", data


async def test_requests_may_be_compressed_and_bombs_are_refused() -> None:
    async with asked() as (made, stub):
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
                data = framed(packed, flag=1)
                headers = await client.ended(client.ask(b"Tokenize", data, grpc_encoding=encoding))
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


# --- flow control ---------------------------------------------------------------------------------


async def test_a_reader_that_stalls_costs_no_memory_and_gets_everything_in_the_end() -> None:
    num_tokens = 200_000
    async with (
        served(max_message_bytes=8 << 20) as made,
        RawClient.to(made.address, window=100) as client,
    ):
        stream = client.ask()
        feed = await made.feed()
        tracemalloc.start()
        for token in range(num_tokens):
            feed.put(token % 128)
            if token % 1000 == 0:
                await asyncio.sleep(0)
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert feed.num_takes < 30  # the rest stays where it is
        assert kept < 3 << 20  # the feed's own list
        assert (await client.ended(client.ask(b"Tokenize", FOUR)))["grpc-status"] == "0"
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


async def test_a_long_answer_passes_a_small_window() -> None:
    async with asked(max_message_bytes=8 << 20) as (_, stub):
        answer = await stub.Tokenize(tokenize("answer 1000000"))
        assert len(answer.ids) == 1_000_000


# --- pings ----------------------------------------------------------------------------------------


async def test_a_ping_is_answered() -> None:
    async with served() as made, RawClient.to(made.address) as client:
        client.h2.ping(b"12345678")
        client.flush()
        await client.until(lambda: bool(client.of(PingAckReceived)))


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
    async with asked() as (made, stub):
        call = stub.Generate(router_pb2.GenerateRequest())
        feed = await made.feed()
        stopping = asyncio.create_task(made.server.stop(10.0))
        await made.until(lambda: made.server.is_stopping)
        error = await error_of(stub.Tokenize(tokenize("four"), timeout=5))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        feed.put(1, 2)
        feed.end()
        assert (await call.read()).tokens.ids == [1, 2]
        assert await call.read() is grpc.aio.EOF
        await asyncio.wait_for(stopping, 5)


async def test_a_request_that_crosses_goaway_is_refused_so_that_it_may_go_elsewhere() -> None:
    async with served() as made, RawClient.to(made.address) as client:
        running = client.ask()
        feed = await made.feed()
        stopping = asyncio.create_task(made.server.stop(10.0))
        await asyncio.sleep(0)
        crossing = client.begin()  # it has not read GOAWAY
        client.h2.state_machine.process_input = lambda _: []  # type: ignore[method-assign]
        await client.until(lambda: bool(client.of(StreamReset, crossing)))
        assert client.of(StreamReset, crossing)[0].error_code == ErrorCodes.REFUSED_STREAM
        feed.end()
        assert (await client.ended(running))["grpc-status"] == "0"
        await asyncio.wait_for(stopping, 5)


async def test_what_runs_longer_than_the_grace_is_ended_by_name() -> None:
    async with asked() as (made, stub):
        asking = asyncio.create_task(error_of(stub.Tokenize(tokenize("wait"))))
        await made.until(lambda: made.service.num_waiting == 1)
        await made.server.stop(0.0)
        error = await asking
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error.details() == "the server shuts down"
        assert made.service.num_waiting == 0


# --- clients that break the rules -----------------------------------------------------------------


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
        st.tuples(st.lists(frames, max_size=8), st.just(b"") | st.binary(max_size=50)).map(
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
            assert (await good.ended(good.ask(b"Tokenize", FOUR)))["grpc-status"] == "0"
            await asyncio.sleep(0)
            writer.close()

    asyncio.run(run())


def test_certificates_are_asked_for_on_the_loop_that_routers_run_on(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    made = authority.issue("router")
    config = TlsConfig(str(made.certificate), str(made.key), str(authority.ca))
    ca, own = authority.ca.read_bytes(), (made.key.read_bytes(), made.certificate.read_bytes())

    async def run() -> None:
        async with served(read_certificates(config).of_grpc) as at:
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
                assert pool.FindServiceByName("grpc.reflection.v1.ServerReflection")
                service = pool.FindServiceByName("baton.v1.RouterService")
                assert "Generate" in service.methods_by_name

        await asyncio.to_thread(find)
