"""Two sets of weights in one cohort, over real sessions: workers and routers die, a stream's tokens
stay those of its model."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from baton.v1 import control_pb2, worker_pb2
from router.router import Router
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
from tests.router.test_cohort_streams import die
from tests.router.test_models_of_streams import ONE, OTHER
from tests.router.test_requests import expected

NOBODY_TO_COME = [
    control_pb2.PoolStatus(name=name, role=role, desired_replicas=1, live_replicas=1)
    for name, role in (("prefill", PREFILL), ("decode", DECODE))
]


async def add_pair(d: Deployment, name: str, model: bytes, weights: int) -> None:
    for kind, role in (("p", PREFILL), ("d", DECODE)):
        kv = b"kv-" + model
        await d.add_worker(
            f"{kind}-{name}", role, kv_fingerprint=kv, model_fingerprint=model, weights=weights
        )


async def add_same(d: Deployment, router: Router) -> None:
    """A pair of the first model, with so much to do that whoever may go elsewhere does."""
    await add_pair(d, "same", ONE, weights=0)
    for kind in ("p", "d"):
        d.worker(f"{kind}-same").load = worker_pb2.WorkerLoad(num_running=5, num_queued_tokens=300)
    await d.registry.publish()

    def is_told() -> bool:
        worker = router.fleet.get("p-same")
        return worker is not None and worker.others_queued_tokens == 300

    await d.until(is_told)


async def begun_on(d: Deployment, name: str) -> tuple[asyncio.Task[list[int]], asyncio.Event]:
    """A stream that stands still on that pair's decode worker, with tokens out."""
    worker, has_begun = d.worker(f"d-{name}"), asyncio.Event()

    def stop(_: object) -> None:
        worker.may_decode.clear()
        has_begun.set()

    worker.on_token = stop

    async def ask() -> list[int]:
        return (await d.client.ask(ask_for(PROMPT, request_id="r"))).ids

    return asyncio.create_task(ask()), has_begun


@pytest.mark.parametrize("is_left", [True, False], ids=["left", "none left"])
async def test_a_stream_whose_worker_dies_takes_no_token_of_other_weights_of_its_cohort(
    text_model: TextModel, is_left: bool
) -> None:
    async with deployment(text_model, prefill=0, decode=0, fleet_wait_s=0.3) as d:
        d.registry.pools = NOBODY_TO_COME
        await add_pair(d, "one", ONE, weights=0)
        await d.connected(2)
        asking, has_begun = await begun_on(d, "one")
        await has_begun.wait()
        await add_pair(d, "other", OTHER, weights=1 << 40)
        if is_left:
            await add_same(d, d.router)
        await d.connected(6 if is_left else 4)
        await die(d, "d-one")
        if is_left:
            assert await asking == expected(PROMPT, 12, 7)
        else:
            with pytest.raises(grpc.aio.AioRpcError, match="the model that its tokens") as refused:
                await asking
            assert error_reason(refused.value) == "NOT_RESUMABLE"
        assert d.worker("d-other").num_reserves == 0
        await d.check_empty()


@pytest.mark.parametrize("is_left", [True, False], ids=["left", "none left"])
async def test_a_router_that_runs_a_stream_again_keeps_to_the_model_that_its_client_was_told(
    text_model: TextModel, is_left: bool
) -> None:
    async with deployment(text_model, prefill=0, decode=0, fleet_wait_s=0.3) as d:
        d.registry.pools = NOBODY_TO_COME
        await add_pair(d, "one", ONE, weights=0)
        await d.connected(2)
        request = ask_for(PROMPT, 40, request_id="r")
        seen = await d.client.ask(request, until=lambda answer: len(answer.ids) >= 3)
        await add_pair(d, "other", OTHER, weights=1 << 40)
        second = await d.add_router()
        if is_left:
            await add_same(d, d.servers[1].router)
        await d.connected(6 if is_left else 4, d.servers[1].router)
        await d.servers.pop(0).stop(0.0)
        await die(d, "d-one")
        request.resume_from_index = len(seen.ids)
        request.model_fingerprints[:] = seen.routed[0].model_fingerprints
        if is_left:
            answer = await second.ask(request)
            assert answer.ids == expected(PROMPT, 40, 7)[len(seen.ids) :]
        else:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await second.ask(request)
            assert error_reason(refused.value) == "NOT_RESUMABLE"
        assert d.worker("d-other").num_reserves == 0
