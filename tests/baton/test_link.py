"""The connection between a router and a worker: calls, their ends, silence and broken frames."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvalidRequestError
from baton.link.frames import OTHERS_ROOM, TOKENS_ROOM, Kind, LinkError, Method
from baton.link.router_end import Link
from baton.link.worker_end import CallContext, Served, _ServedLink, answers, streams
from baton.status import abort, from_rpc_error
from baton.unfinished import Unfinished
from baton.v1 import worker_pb2
from tests.identities import ROUTER
from tests.link_stub import ASK, LinkStub, WorkerPort, attached
from tests.router.proxy import Proxy


@asynccontextmanager
async def served(methods: Mapping[Method, Served]) -> AsyncIterator[WorkerPort]:
    one = WorkerPort(methods)
    try:
        await one.start()
        yield one
    finally:
        await one.stop()


@asynccontextmanager
async def port(methods: Mapping[Method, Served]) -> AsyncIterator[str]:
    """The address of one."""
    async with served(methods) as one:
        yield one.address


async def connect(address: str, keepalive_s: float = 5.0) -> Link:
    return await Link.connect(address, ROUTER, keepalive_s=keepalive_s, timeout_s=5.0)


async def test_calls_go_side_by_side_each_to_its_own_end() -> None:
    gate = asyncio.Event()

    async def prefill(
        request: worker_pb2.PrefillRequest, context: CallContext
    ) -> AsyncIterator[worker_pb2.PrefillResponse]:
        yield worker_pb2.PrefillResponse(first_token=worker_pb2.FirstToken(id=7))
        await gate.wait()
        yield worker_pb2.PrefillResponse(handoff_done=worker_pb2.HandoffDone(num_blocks=3))

    methods = {Method.PREFILL: streams(prefill), Method.ATTACH: answers(attached)}
    async with port(methods) as address:
        stub = LinkStub(address)
        call = await stub.prefill(worker_pb2.PrefillRequest())
        assert (await call.read()).first_token.id == 7
        assert (await stub.attach(ASK)).spec.request_id == "r"
        gate.set()
        assert (await call.read()).handoff_done.num_blocks == 3
        assert await call.read() is None
        await stub.close()


async def test_errors_arrive_with_code_words_and_field() -> None:
    async def refuse(request: object, context: CallContext) -> worker_pb2.AttachResponse:
        await abort(context, InvalidRequestError("no good", field="seed"))

    async with port({Method.ATTACH: answers(refuse)}) as address:
        stub = LinkStub(address)
        with pytest.raises(LinkError) as caught:
            await stub.attach(ASK)
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidRequestError)
        assert (error.message, error.field) == ("no good", "seed")
        call = await stub.follow_kv()
        with pytest.raises(LinkError, match="FOLLOW_KV is not served here") as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await stub.close()


async def test_a_cancelled_call_ends_at_the_worker_and_a_lost_link_ends_all() -> None:
    began, ended = asyncio.Queue[None](), asyncio.Queue[None]()

    async def wait(request: object, context: CallContext) -> AsyncIterator[worker_pb2.Lease]:
        began.put_nowait(None)
        try:
            await asyncio.Event().wait()
            yield worker_pb2.Lease()
        finally:
            ended.put_nowait(None)

    async with port({Method.PREFILL: streams(wait)}) as address:
        stub = LinkStub(address)
        calls = [await stub.prefill(worker_pb2.PrefillRequest()) for _ in range(2)]
        for _ in calls:
            await began.get()
        calls[0].cancel()
        await ended.get()
        (await stub.link()).close("cut here")
        with pytest.raises(LinkError, match="cut here"):
            await calls[1].read()
        await ended.get()
        with pytest.raises(LinkError, match="the connection is lost"):
            await stub.attach(ASK)


async def test_a_peer_that_falls_silent_is_lost_and_a_quiet_one_is_not() -> None:
    async with port({}) as address:
        proxy = await Proxy.to(address)
        link = await connect(proxy.address, keepalive_s=0.1)
        await asyncio.wait({link.lost}, timeout=1.0)  # ten times its patience: pings go both ways
        assert link.is_open
        proxy.freeze()
        assert await asyncio.wait_for(link.lost, 5) == "nothing was heard for 0.2 s"
        with pytest.raises(TimeoutError):
            await Link.connect(proxy.address, ROUTER, keepalive_s=1.0, timeout_s=0.2)
        proxy.thaw()
        await proxy.close()


async def test_tokens_are_taken_while_kv_events_wait_for_a_slow_router() -> None:
    sizes = {"kv": 0, "tokens": 0}

    async def kv(
        request: object, context: CallContext
    ) -> AsyncIterator[worker_pb2.SubscribeKvResponse]:
        while True:
            sizes["kv"] += 1 << 10
            yield worker_pb2.SubscribeKvResponse(removed=bytes(1 << 10))
            await asyncio.sleep(0)  # the loop's other work, as between two steps

    async def tokens(
        requests: AsyncIterator[worker_pb2.SessionRequest], context: CallContext
    ) -> AsyncIterator[worker_pb2.SessionResponse]:
        await anext(requests)  # to open it
        while True:
            await anext(requests)
            sizes["tokens"] += 1
            yield worker_pb2.SessionResponse(tokens=[worker_pb2.RequestTokens(ids=[1])])

    methods = {Method.FOLLOW_KV: streams(kv), Method.SESSION: Served(tokens, TOKENS_ROOM)}
    async with served(methods) as one:
        stub = LinkStub(one.address)
        session = stub.session()
        await session.write(worker_pb2.SessionRequest())
        link = await stub.link()
        link._transport.pause_reading()  # type: ignore[union-attr]  # a router that reads nothing
        call = await stub.follow_kv()
        async with asyncio.timeout(20):
            while one.num_unsent <= OTHERS_ROOM:  # noqa: ASYNC110  beyond it the events wait
                await asyncio.sleep(0.01)
        for count in range(1, 4):
            await session.write(worker_pb2.SessionRequest())
            async with asyncio.timeout(10):
                while sizes["tokens"] < count:  # noqa: ASYNC110  it is a number
                    await asyncio.sleep(0.01)
            assert one.num_unsent > OTHERS_ROOM
        link._transport.resume_reading()  # type: ignore[union-attr]
        assert (await asyncio.wait_for(session.read(), 10)).tokens
        call.cancel()
        await stub.close()


async def test_a_frame_that_is_too_long_ends_its_connection_unread() -> None:
    async with port({Method.ATTACH: answers(attached)}) as address:
        link = await connect(address)
        link._transport.write(struct.pack("<IBI", 1 << 31, 3, 1))  # type: ignore[union-attr]
        await asyncio.wait_for(link.lost, 10)
        stub = LinkStub(address)
        assert (await stub.attach(ASK)).spec.request_id == "r"
        await stub.close()


async def test_frames_that_never_end_share_a_budget_and_the_oldest_gives_way() -> None:
    async with served({Method.ATTACH: answers(attached)}) as one:
        one.links.unfinished = Unfinished(100_000)
        links = [await connect(one.address, keepalive_s=30.0) for _ in range(4)]
        for link in links:
            assert link._transport is not None
            link._transport.write(struct.pack("<IBI", 1 << 20, Kind.CALL, 1) + bytes(30_000))
            with contextlib.suppress(LinkError):
                await asyncio.wait_for(link.ask(Method.ATTACH, ASK, 0.01), 10)
        assert "closed" in await asyncio.wait_for(links[0].lost, 10)
        assert all(link.is_open for link in links[1:])
        for link in links[1:]:
            link.close("the test is over")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 255), st.integers(0, 3), st.binary(max_size=40))))
def test_broken_frames_harm_no_other_connection(frames: list[tuple[int, int, bytes]]) -> None:
    async def run() -> None:
        async with port({Method.ATTACH: answers(attached)}) as address:
            good = LinkStub(address)
            assert (await good.attach(ASK)).spec.request_id == "r"
            _, stranger = await asyncio.open_connection(*address.split(":"))
            router = (await connect(address))._transport
            assert router is not None
            for kind, call, payload in frames:
                for writer in (stranger, router):
                    writer.write(struct.pack("<IBI", len(payload), kind, call) + payload)
            stranger.close()
            router.close()
            assert (await good.attach(ASK)).spec.request_id == "r"
            await good.close()

    asyncio.run(run())


async def test_a_call_that_is_cancelled_as_it_comes_leaves_nothing() -> None:
    async def prefill(
        request: worker_pb2.PrefillRequest, context: CallContext
    ) -> AsyncIterator[worker_pb2.PrefillResponse]:
        await asyncio.Event().wait()
        yield worker_pb2.PrefillResponse()

    async with port(
        {Method.PREFILL: streams(prefill), Method.ATTACH: answers(attached)}
    ) as address:
        stub = LinkStub(address)
        await stub.attach(ASK)
        for _ in range(20):  # both frames in one read
            call = await stub.prefill(worker_pb2.PrefillRequest())
            call.cancel()
        await stub.attach(ASK)
        left = [task for task in asyncio.all_tasks() if task.get_name() == "link:PREFILL"]
        assert not left
        served = [each for each in gc.get_objects() if type(each) is _ServedLink]
        assert all(not link.num_calls for link in served)
        await stub.close()


async def test_a_method_of_a_later_release_is_refused_alone() -> None:
    async with port({Method.ATTACH: answers(attached)}) as address:
        stub = LinkStub(address)
        link = await stub.link()
        link._send(3, 77, bytes((200,)))  # type: ignore[arg-type]  # a CALL that no method names
        assert (await stub.attach(ASK)).spec.request_id == "r"
        await stub.close()


async def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.link.worker_end.HELLO_WITHIN_S", 0.2)
    async with port({}) as address:
        host, _, number = address.rpartition(":")
        for first in (b"", b"PRI"):
            reader, writer = await asyncio.open_connection(host, int(number))
            writer.write(first)
            assert b"no proof within 0.2 s" in await asyncio.wait_for(reader.read(), 10)
            writer.close()


async def test_what_is_unsent_goes_out_before_a_worker_s_port_closes() -> None:
    async def tokens(
        requests: AsyncIterator[worker_pb2.SessionRequest], context: CallContext
    ) -> AsyncIterator[worker_pb2.SessionResponse]:
        await anext(requests)
        for index in range(2000):
            ids = [worker_pb2.RequestTokens(request_id="r", index=index, ids=range(100))]
            yield worker_pb2.SessionResponse(tokens=ids)
        sent.set()
        await asyncio.Event().wait()

    sent = asyncio.Event()
    async with port({Method.SESSION: Served(tokens, 64 << 20)}) as address:
        stub = LinkStub(address)
        session = stub.session()
        await session.write(worker_pb2.SessionRequest())
        await sent.wait()
    for index in range(2000):
        assert (await session.read()).tokens[0].index == index
    await stub.close()
