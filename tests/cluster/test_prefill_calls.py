"""What a prefill worker refuses, and what it says when its handoff breaks."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.v1 import worker_pb2
from cluster.pools.role_plan import Role


async def refusal(pair: Any, spec: worker_pb2.RequestSpec, lease: worker_pb2.Lease) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pair.router.hand_off(spec, lease)
    return caught.value.code()


async def test_requests_and_leases_that_cannot_be_served_are_refused_before_any_work(
    pair: Any, kit: Any
) -> None:
    good = kit.make_spec("good", 60)
    lease = await pair.router.reserve(good, pair.writer)
    torn = kit.make_spec("torn", 60)
    torn.token_ids = b"abc"
    assert await refusal(pair, torn, lease) is grpc.StatusCode.INVALID_ARGUMENT
    other = kit.make_spec("other", 60)
    other.kv_fingerprint = b"another"
    (response,) = await pair.router.hand_off(other, lease)
    assert response.handoff_failed.reason == "FINGERPRINT"
    stray = worker_pb2.Lease()
    stray.CopyFrom(lease)
    stray.writer.incarnation += 1
    (response,) = await pair.router.hand_off(good, stray)
    assert response.handoff_failed.reason == "REPLACED"
    wrong = kit.make_spec("wrong", 60)
    wrong.sampling.temperature = -1.0
    assert await refusal(pair, wrong, lease) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_lease_is_served_once(pair: Any, kit: Any) -> None:
    spec = kit.make_spec("once", 60)
    lease = await pair.router.reserve(spec, pair.writer)
    await pair.router.hand_off(spec, lease)
    assert await refusal(pair, spec, lease) is grpc.StatusCode.FAILED_PRECONDITION
    heard = pair.link.of("once")
    await pair.link.until(lambda: heard.finished)
    assert heard.in_order() == kit.oracle.tokens(spec)


async def test_a_draining_prefill_worker_refuses_new_prompts(pair: Any, kit: Any) -> None:
    spec = kit.make_spec("late", 60)
    lease = await pair.router.reserve(spec, pair.writer)
    pair.prefill.prefill.begin_drain()
    (response,) = await pair.router.hand_off(spec, lease)
    assert response.handoff_failed.reason == "DRAINING"
    await pair.link.cancel("late")


async def test_a_lease_fenced_while_its_prompt_is_computed_ends_the_prefill_with_the_reason(
    pair: Any, kit: Any
) -> None:
    spec = kit.make_spec("fenced", 3500)
    lease = await pair.router.reserve(spec, pair.writer)
    call = asyncio.create_task(pair.router.hand_off(spec, lease))
    async with asyncio.timeout(10):
        while (await kit.load_of(pair.prefill)).num_queued_tokens == 0:
            pass
    await pair.link.cancel("fenced")
    responses = await call
    assert responses[-1].handoff_failed.reason == "FENCED"
    for worker in (pair.prefill, pair.decode):
        await kit.nothing_held(worker)


async def test_a_mixed_worker_serves_both_roles(kit: Any) -> None:
    async with (
        kit.running_worker("mixed-0", Role.MIXED) as first,
        kit.running_worker("mixed-1", Role.MIXED) as second,
    ):
        for prefill, decode in ((first, second), (second, first)):
            link = kit.decode_link(decode.address, "router-a")
            await link.open()
            router = kit.mini_router(prefill.address, link)
            spec = kit.make_spec(f"to-{decode.info().ref.worker_id}", 80)
            assert await router.generate(spec, prefill.info().ref) == kit.oracle.tokens(spec)
            await router.close()
            await link.close()
