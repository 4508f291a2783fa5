"""Prefill calls: repeated, cut off and retried."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.config.engine import FakeEngineConfig
from baton.fleet import Role
from baton.link.frames import LinkError
from baton.v1 import worker_pb2
from kv_transfer.transports.memory_transport import MemoryNetwork, Operation, ThreadScheduler
from tests.cluster.conftest import (
    ENGINE,
    DecodeLink,
    HeldStep,
    MiniRouter,
    Oracle,
    load_of,
    make_spec,
    nothing_held,
    running_worker,
    until,
)


async def refusal(pair: Any, spec: worker_pb2.RequestSpec, lease: worker_pb2.Lease) -> Any:
    with pytest.raises(LinkError) as caught:
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
            link = await kit.decode_link(decode.address, "router-a").open()
            router = kit.mini_router(prefill.address, link)
            spec = kit.make_spec(f"to-{decode.info().ref.worker_id}", 80)
            assert await router.generate(spec, prefill.info().ref) == kit.oracle.tokens(spec)
            await router.close()
            await link.close()


# Room for two attempts of one prompt, not for three; steps take time, so that one can be held.
SMALL = replace(
    ENGINE,
    num_blocks=24,
    fake=FakeEngineConfig(window=20, vocab_size=50_000, decode_step_s=1e-6),
)


class LateWriter(ThreadScheduler):
    """Keeps what the first process that puts anything puts and flushes; all else runs."""

    def __init__(self) -> None:
        super().__init__()
        self.writer: bytes | None = None
        self.held: list[Operation] = []

    def schedule(self, operation: Operation) -> None:
        if operation.kind == "put" and self.writer is None:
            self.writer = operation.source
        if operation.kind in ("put", "flush") and operation.source == self.writer:
            self.held.append(operation)
        else:
            super().schedule(operation)

    def land(self) -> None:
        """Returns when all that was kept is in its target's memory."""
        landed = threading.Event()
        for operation in (*self.held, Operation("message", b"", b"", landed.set)):
            super().schedule(operation)
        assert landed.wait(10)


def blocks_of(lease: worker_pb2.Lease) -> list[set[int]]:
    """By layer group; the null block is nobody's."""
    return [set(group.block_ids) - {0} for group in lease.groups]


async def test_a_second_attempt_gets_other_blocks_than_those_a_late_writer_still_reaches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = LateWriter()
    monkeypatch.setattr(MemoryNetwork, "_shared", MemoryNetwork(late))
    async with (
        running_worker("prefill-0", Role.PREFILL) as lost,
        running_worker("prefill-1", Role.PREFILL) as sound,
        running_worker("decode-0", Role.DECODE, SMALL) as decode,
    ):
        link = await DecodeLink(decode.address, "router-a").open()
        first_router, router = MiniRouter(lost.address, link), MiniRouter(sound.address, link)
        first, second = (make_spec("retried", 60, attempt=attempt) for attempt in (1, 2))
        given_up = await first_router.reserve(first, lost.info().ref)
        writing = asyncio.create_task(first_router.hand_off(first, given_up))
        await until(lambda: late.held)

        lease = await router.reserve(second, sound.info().ref)
        quarantined = blocks_of(given_up)
        assert [len(blocks) for blocks in quarantined] == [len(b) for b in blocks_of(lease)]
        assert not [both for both in map(set.intersection, quarantined, blocks_of(lease)) if both]
        load = await load_of(decode)
        assert load.num_quarantined_blocks == max(map(len, quarantined))

        # Nor does anybody else get them: a prompt that they would do for has to wait.
        other = make_spec("other", 60)
        await link.reserve(other, sound.info().ref)
        await link.until(lambda: link.of("other").rejected)
        rejected = link.of("other").rejected
        assert rejected is not None
        assert rejected.reason == worker_pb2.REJECT_REASON_NO_CAPACITY

        # What the lost writer had put lands between the second attempt's KV and its first step.
        step = HeldStep(decode)
        await router.hand_off(second, lease)
        await until(step.begun.is_set)
        await asyncio.to_thread(late.land)
        step.go_on.set()
        heard = link.of("retried", 2)
        await link.until(lambda: heard.finished)
        assert heard.in_order() == Oracle().tokens(second)
        assert (await writing)[-1].handoff_failed.reason == "FENCED"

        await nothing_held(lost, sound, decode)
        link.of("other").rejected = None
        assert await router.generate(other, sound.info().ref) == Oracle().tokens(other)
        for each in (first_router, router):
            await each.close()
        await link.close()
