"""Another model behind the registry: no stream goes on with it, new requests do."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from tests.router.answers import PROMPT, ask_for, assert_whole, error_reason
from tests.router.deployment import DECODE, PREFILL, Deployment, deployment

OTHER = 1 << 40  # weights of the model that comes: its tokens are others


async def replace_model(d: Deployment) -> None:
    """Another unit takes the place of this one; the old workers go on, unknown to the registry."""
    d.registry.workers = []
    for name, role in (("p1", PREFILL), ("d1", DECODE)):
        await d.add_worker(name, role, weights=OTHER)
    d.registry.model_fingerprint = b"other"
    await d.registry.publish()


async def test_a_unit_whose_model_is_replaced_ends_its_streams_and_gets_another_router() -> None:
    async with deployment(admission={"fleet_wait_s": 5.0}) as d:
        old, has_begun, first = d.worker("d0"), asyncio.Event(), d.router

        def stop(_: object) -> None:
            old.may_decode.clear()
            has_begun.set()

        old.on_token = stop
        streams = asyncio.create_task(d.client.ask(ask_for(PROMPT, request_id="streams")))
        await has_begun.wait()
        await replace_model(d)
        with pytest.raises(grpc.aio.AioRpcError, match="not served any more") as refused:
            await streams
        assert error_reason(refused.value) == "NOT_RESUMABLE"
        await d.until(lambda: d.servers[0].units.routers not in ([], [first]))
        assert (len(first.runs), d.router.model.fingerprint) == (0, b"other")
        first.check_integrity()
        assert not d.servers[0].units.fault.done()
        answer = await d.client.ask(ask_for(PROMPT, request_id="new"))
        assert answer.routed[0].decode_worker == "d1"
        assert answer.routed[0].unit == "/" + b"other".hex()


async def test_a_client_that_brings_another_models_tokens_is_refused() -> None:
    async with deployment() as d:
        resumed = {"request_id": "r", "seed": 1, "unit": "/" + b"other".hex()}
        with pytest.raises(grpc.aio.AioRpcError, match="not served any more") as refused:
            await d.client.ask(ask_for(PROMPT, **resumed, resume_from_index=1))
        assert error_reason(refused.value) == "NOT_RESUMABLE"
        answer = await d.client.ask(ask_for(PROMPT, **resumed, resume_from_index=0))
        assert_whole(answer, PROMPT, seed=1)
