"""A lease whose owner is none, one that lasts no time, and an error of the worker's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.fleet import Role
from baton.link.frames import LinkError
from baton.v1 import worker_pb2
from cluster.worker.worker import WorkerFailedError
from tests.cluster.conftest import (
    TIMED_ENGINE,
    HeldStep,
    Oracle,
    make_spec,
    running_worker,
)
from tests.decode_worker.links import paired, routed


def without_ranks(lease: worker_pb2.Lease) -> None:
    del lease.owner.ranks[:], lease.ranks[:]


def without_a_writer(lease: worker_pb2.Lease) -> None:
    lease.ClearField("writer")


def without_tables(lease: worker_pb2.Lease) -> None:
    del lease.groups[:]


def over_at_once(lease: worker_pb2.Lease) -> None:
    lease.renew_within_ms = 0


@pytest.mark.parametrize("spoil", [without_ranks, without_a_writer, over_at_once, without_tables])
async def test_a_lease_that_cannot_be_served_is_its_owner_s_fault_and_refused_before_it_is_opened(
    spoil: Callable[[worker_pb2.Lease], None],
) -> None:
    async with paired() as pair:
        router = pair.router
        spec = make_spec("x")
        lease = await router.reserve(spec, pair.writer)
        wrong = worker_pb2.Lease()
        wrong.CopyFrom(lease)
        spoil(wrong)
        with pytest.raises(LinkError) as caught:
            await router.hand_off(spec, wrong)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.INTERNAL
        assert pair.prefill.exporter.num_open() == 0
        await router.hand_off(spec, lease)
        with pytest.raises(LinkError) as caught:
            await router.hand_off(spec, lease)
        error = caught.value
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION  # its owner reports how it ends
        await pair.link.until(lambda: pair.link.of("x").finished)
        assert pair.link.of("x").in_order() == Oracle().tokens(spec)


async def finish_twice() -> None:
    async with (
        running_worker("decode-0", Role.DECODE) as decode,
        running_worker("prefill-0", Role.PREFILL, TIMED_ENGINE) as prefill,
        routed(prefill, decode) as pair,
    ):
        spec = make_spec("x")
        step = HeldStep(prefill)
        lease = await pair.router.reserve(spec, pair.writer)
        asking = asyncio.create_task(pair.router.hand_off(spec, lease))
        await asyncio.to_thread(step.begun.wait, 10)
        # Only a bug could do this, so the test writes into the table.
        for export in prefill.exporter._exports.values():
            export.finishing_at_s = 0.0
        step.go_on.set()
        with pytest.raises(LinkError):
            await asking
        await prefill.left.wait()


async def test_an_assertion_in_a_prefill_ends_the_call_and_the_worker() -> None:
    with pytest.raises(WorkerFailedError, match="finished twice"):
        await finish_twice()
