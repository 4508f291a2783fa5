"""Another model behind the registry: no stream goes on with it, new requests do."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from baton.errors import NotResumableError
from baton.v1 import control_pb2
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
from tests.router.test_placement import Clock
from tests.router.test_requests import assert_whole

OTHER = 1 << 40  # weights of the model that comes: its tokens are others


def test_a_model_replaces_another_one_only() -> None:
    model = ServedModel(Clock(), 100.0)
    assert not model.update(b"")  # no worker has registered
    assert not model.update(b"one")
    assert not model.update(b"one")
    assert not model.update(b"")  # the registry was started again
    assert not model.update(b"one")
    assert model.update(b"other")
    assert not model.update(b"other")


def test_streams_may_be_of_the_replaced_model_for_as_long_as_one_may_live() -> None:
    clock = Clock()
    model = ServedModel(clock, 100.0)
    model.update(b"one")
    model.check_resumable()
    model.update(b"other")
    clock.now_s += 100.0
    with pytest.raises(NotResumableError, match="not served any more"):
        model.check_resumable()
    clock.now_s += 1.0
    model.check_resumable()


async def replace_model(d: Deployment, *, same_places: bool) -> None:
    """Another unit takes the place of this one; the old workers go on, unknown to the registry."""
    kinds = (("p", PREFILL), ("d", DECODE))
    d.registry.workers = []
    for letter, role in kinds:
        name, incarnation = (f"{letter}0", 2) if same_places else (f"{letter}1", 1)
        await d.add_worker(name, role, incarnation, weights=OTHER)
    d.registry.model_fingerprint = b"other"
    await d.registry.publish()
    weights = [worker.incarnation for worker in d.registry.workers]
    await d.until(
        lambda: [entry.facts.incarnation for entry in d.router.fleet if entry.usable] == weights
    )


@pytest.mark.parametrize("same_places", [True, False], ids=["same places", "other places"])
async def test_a_stream_is_not_gone_on_with_and_what_has_no_token_gets_the_new_model_s_alone(
    text_model: TextModel, same_places: bool
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
        d.worker("p0").may_prefill.clear()
        waits = asyncio.create_task(d.client.ask(ask_for("no token yet", request_id="waits")))
        await d.until(lambda: d.worker("p0").num_prefilling == 1)
        assert len(d.router.index) > 0
        await replace_model(d, same_places=same_places)
        with pytest.raises(grpc.aio.AioRpcError, match="not served any more") as refused:
            await streams
        assert error_reason(refused.value) == "NOT_RESUMABLE"
        assert_whole(await waits, "no token yet", seed=7 ^ OTHER)
        assert_whole(await d.client.ask(ask_for(PROMPT)), PROMPT, seed=7 ^ OTHER)
        again = ask_for(PROMPT, request_id="streams", resume_from_index=1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await d.client.ask(again)
        assert error_reason(refused.value) == "NOT_RESUMABLE"
        await d.until(lambda: d.router.num_active == 0)
        d.router.check_integrity()


async def test_what_the_old_model_s_workers_held_is_in_the_index_no_longer(
    text_model: TextModel,
) -> None:
    async with deployment(text_model) as d:
        d.registry.model_fingerprint = b"one"
        await d.registry.publish()
        assert_whole(await d.client.ask(ask_for(PROMPT)), PROMPT)
        await d.until(lambda: len(d.router.index) > 0)
        d.registry.workers, d.registry.model_fingerprint = [], b"other"
        await d.registry.publish()
        await d.until(lambda: len(d.router.fleet) == 0)
        assert len(d.router.index) == 0


async def test_a_stream_in_line_is_not_gone_on_with(text_model: TextModel) -> None:
    async with deployment(text_model, fleet_wait_s=20.0) as d:
        d.registry.model_fingerprint = b"one"
        await d.registry.publish()
        old, has_begun = d.worker("d0"), asyncio.Event()

        def stop(_: object) -> None:
            old.may_decode.clear()
            has_begun.set()

        old.on_token = stop
        streams = asyncio.create_task(d.client.ask(ask_for(PROMPT, request_id="streams")))
        await has_begun.wait()
        old.state = control_pb2.WORKER_STATE_GONE
        await old.die()
        await d.registry.publish()
        await d.until(lambda: len(d.router.admission) == 1)
        d.registry.workers, d.registry.model_fingerprint = [], b""
        await d.registry.publish()  # the old unit has gone
        await replace_model(d, same_places=False)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await streams
        assert error_reason(refused.value) == "NOT_RESUMABLE"
        assert d.worker("d1").num_reserves == 0
        await d.check_empty()
