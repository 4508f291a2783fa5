"""A session that nobody opens: ended within a bound, and the worker serves on."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from baton.config.decode import DecodeConfig
from baton.errors import DeadlineError
from baton.status import from_rpc_error
from baton.v1 import worker_pb2_grpc
from cluster.pools.role_plan import Role
from tests.cluster.conftest import DecodeLink, Oracle, make_spec, running_worker


async def test_a_session_that_never_says_whose_it_is_is_ended_by_a_typed_error() -> None:
    decode = DecodeConfig(open_timeout_s=0.2)
    async with running_worker("decode-0", Role.DECODE, decode=decode) as worker:
        async with grpc.aio.insecure_channel(worker.address) as channel:
            call = worker_pb2_grpc.DecodeServiceStub(channel).Session()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(call.read(), 10)
            error = from_rpc_error(caught.value)
            assert isinstance(error, DeadlineError)
            assert error.message == "no first message within 0.2 s"
        link, spec = DecodeLink(worker.address, "router-a"), make_spec("good")
        await link.open()
        await link.reserve(spec)
        await link.until(lambda: link.of("good").finished)
        assert link.of("good").in_order() == Oracle().tokens(spec)
        await link.close()
