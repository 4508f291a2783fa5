"""Another model behind the registry: no stream goes on with it, new requests do."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from baton.errors import NotResumableError
from router.served_model import ServedModel
from router.text import TextModel
from tests.router.deployment import (
    DECODE,
    PREFILL,
    PROMPT,
    Deployment,
    ask_for,
    deployment,
    error_reason,
)

OTHER = 1 << 40  # weights of the model that comes: its tokens are others


def test_a_router_serves_the_first_model_that_it_hears_of() -> None:
    model = ServedModel()
    assert not model.is_replaced_by(b"")  # no worker has registered
    assert not model.is_replaced_by(b"one")
    assert not model.is_replaced_by(b"")  # the registry was started again
    assert not model.is_replaced_by(b"one")
    assert model.is_replaced_by(b"other")
    assert model.fingerprint == b"one"


def test_tokens_of_another_model_are_not_gone_on_with() -> None:
    model = ServedModel()
    model.check_same(b"one")  # nothing is known yet
    assert not model.is_replaced_by(b"one")
    model.check_same(b"one")
    model.check_same(b"")  # the client brings none
    with pytest.raises(NotResumableError, match="not served any more"):
        model.check_same(b"other")


async def replace_model(d: Deployment) -> None:
    """Another unit takes the place of this one; the old workers go on, unknown to the registry."""
    d.registry.workers = []
    for name, role in (("p1", PREFILL), ("d1", DECODE)):
        await d.add_worker(name, role, weights=OTHER)
    d.registry.model_fingerprint = b"other"
    await d.registry.publish()


async def test_a_router_whose_model_is_replaced_ends_its_streams_and_itself(
    text_model: TextModel,
) -> None:
    async with deployment(text_model, fleet_wait_s=5.0) as d:
        d.registry.model_fingerprint = b"one"
        await d.registry.publish()
        old, has_begun = d.worker("d0"), asyncio.Event()

        def stop(_: object) -> None:
            old.may_decode.clear()
            has_begun.set()

        old.on_token = stop
        streams = asyncio.create_task(d.client.ask(ask_for(PROMPT, request_id="streams")))
        await has_begun.wait()
        assert not d.router.fault.done()
        await replace_model(d)
        with pytest.raises(grpc.aio.AioRpcError, match="not served any more") as refused:
            await streams
        assert error_reason(refused.value) == "NOT_RESUMABLE"
        await d.router.fault
        assert len(d.router.index) == 0
        assert d.worker("d1").num_reserves == 0
        d.router.check_integrity()


async def test_a_client_that_brings_another_models_tokens_is_refused(
    text_model: TextModel,
) -> None:
    async with deployment(text_model) as d:
        d.registry.model_fingerprint = b"one"
        await d.registry.publish()
        await d.until(lambda: d.router._parts.model.fingerprint == b"one")  # as the next call sees
        resumed = {"request_id": "r", "seed": 1, "resume_from_index": 1}
        with pytest.raises(grpc.aio.AioRpcError, match="not served any more") as refused:
            await d.client.ask(ask_for(PROMPT, **resumed, model_fingerprint=b"other"))
        assert error_reason(refused.value) == "NOT_RESUMABLE"
        answer = await d.client.ask(ask_for(PROMPT, request_id="whole"))
        assert answer.routed[0].model_fingerprint == b"one"
