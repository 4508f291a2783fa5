"""A worker that is asked to drain: what it refuses, what it finishes, and when it leaves."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from baton.config.workers import WorkerSettings
from baton.fleet import Role
from baton.link.frames import Method
from baton.link.router_end import ask_once
from baton.v1 import worker_pb2
from decode_worker.request_log import Submission
from decode_worker.session import Refusal
from engine.wire import read_spec
from kv_transfer.errors import LeaseServedError
from kv_transfer.lease import Lease, LeaseId, WorkerIdentity
from prefill_worker.role import DrainingError
from tests.identities import OPERATOR


def submission_of(wire: worker_pb2.RequestSpec) -> Submission:
    ids = (wire.request_id, wire.attempt, wire.tenant)
    kind = (wire.body_digest, wire.kv_fingerprint)
    return Submission(read_spec(wire), *ids, *kind, None, wire.SerializeToString())


async def test_a_draining_worker_refuses_finishes_and_leaves(kit: Any) -> None:
    async with kit.running_worker("decode-8", Role.DECODE) as worker:
        link = await kit.decode_link(worker.address, "router-a").open()
        spec = kit.make_spec("last", 60)
        spec.sampling.max_tokens = 500
        await link.reserve(spec)
        await link.until(lambda: link.of("last").tokens)
        request = worker_pb2.DrainRequest()
        await ask_once(worker.address, OPERATOR, Method.DRAIN, request, 10.0)
        await link.reserve(kit.make_spec("late", 60))
        await link.until(lambda: link.of("late").rejected)
        assert link.of("late").rejected.reason == worker_pb2.REJECT_REASON_DRAINING
        await link.until(lambda: link.of("last").finished)
        assert link.of("last").in_order() == kit.oracle.tokens(spec)
        await worker.left.wait()
        await link.close()


async def test_a_worker_asked_to_drain_takes_no_call_that_is_read_in_the_same_turn(
    kit: Any,
) -> None:
    """It might be idle just now, and so be taken for drained with that call on it."""
    async with kit.running_worker("decode-0", Role.DECODE) as worker:
        worker.drain(0.0)
        identity = WorkerIdentity.from_proto(worker.info().ref)
        unserved = Lease(LeaseId("late"), 1, identity, identity, b"", (), 0, 2.0, ())
        with pytest.raises(DrainingError):
            worker.prefill.start(kit.make_spec("late"), unserved, None)
        # A session would cost a turn of the loop, in which the drain goes on.
        refusal = worker.decode._refusal(submission_of(kit.make_spec("late")))
        assert refusal is not None
        assert refusal[0] is Refusal.DRAINING


async def test_a_lease_that_is_served_already_is_refused_as_such_also_while_draining(
    kit: Any,
) -> None:
    """Another router that asks for it waits for the handoff, and nothing is computed again."""
    async with (
        kit.running_worker("prefill-0", Role.PREFILL) as prefill,
        kit.running_worker("decode-0", Role.DECODE) as decode,
    ):
        link = await kit.decode_link(decode.address, "router-a").open()
        router = kit.mini_router(prefill.address, link)
        spec = kit.make_spec("x")
        lease = Lease.from_proto(await router.reserve(spec, prefill.info().ref))
        served = prefill.prefill.start(read_spec(spec), lease, None)
        prefill.prefill.begin_drain()
        with pytest.raises(LeaseServedError):
            prefill.prefill.start(read_spec(spec), lease, None)
        while await served.next() is not None:
            pass
        await link.until(lambda: link.of("x").finished)
        await router.close()
        await link.close()
        await kit.nothing_held(prefill, decode)


async def test_a_worker_that_drained_leaves_once_its_routers_have_taken_the_last_tokens(
    kit: Any,
) -> None:
    async with kit.running_worker("decode-9", Role.DECODE) as worker:
        session = worker.decode.open_session("router-a/1")
        wire = kit.make_spec("last", 60)
        worker.decode.submit(session, submission_of(wire), None)
        worker.drain()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(worker.left.wait(), 1.5)
        assert worker.decode.is_idle
        (run,) = (await anext(updates := session.updates())).tokens
        assert list(run.token_ids) == kit.oracle.tokens(wire)
        assert not worker.left.is_set()
        over = asyncio.ensure_future(anext(updates))  # the stream asks for more: it has taken this
        await asyncio.wait_for(worker.left.wait(), 5)
        over.cancel()


async def test_a_worker_that_drained_gives_a_router_up_that_takes_nothing(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.worker.worker._TAKEN_WITHIN_S", 0.3)
    async with kit.running_worker("decode-9", Role.DECODE) as worker:
        session = worker.decode.open_session("router-a/1")
        worker.decode.submit(session, submission_of(kit.make_spec("last", 60)), None)
        worker.drain()
        await asyncio.wait_for(worker.left.wait(), 10)
        assert not session.has_sent_all


async def test_a_drain_under_way_takes_no_longer_than_whoever_asks_for_it_again_lets_it(
    kit: Any,
) -> None:
    """A machine that is called back while its pod drains lets nothing have a pool's whole time."""
    slow = dataclasses.replace(kit.engine.fake, decode_step_s=0.01)
    engine = dataclasses.replace(kit.engine, fake=slow)
    async with kit.running_worker("decode-9", Role.DECODE, engine) as worker:
        session = worker.decode.open_session("router-a/1")
        wire = kit.make_spec("long", 60)
        wire.sampling.max_tokens = 5000
        worker.decode.submit(session, submission_of(wire), None)
        worker.drain(600)
        worker.drain(0.5)
        worker.drain(600)  # and no one gives it time again
        await asyncio.wait_for(worker.left.wait(), 10)
        assert not worker.decode.is_idle


async def test_a_drain_under_way_keeps_its_time_where_it_is_asked_for_again_without_one(
    kit: Any,
) -> None:
    """The registry does so, once it has heard that the worker drains."""
    slow = dataclasses.replace(kit.engine.fake, decode_step_s=0.01)
    engine = dataclasses.replace(kit.engine, fake=slow)
    settings = WorkerSettings(heartbeat_s=0.05, metrics_port=None, drain_timeout_s=0.2)
    async with kit.running_worker("decode-9", Role.DECODE, engine, settings=settings) as worker:
        link = await kit.decode_link(worker.address, "router-a").open()
        spec = kit.make_spec("long", 60)
        spec.sampling.max_tokens = 200
        await link.reserve(spec)
        await link.until(lambda: link.of("long").tokens)
        worker.drain(600)
        worker.drain()
        await link.until(lambda: link.of("long").finished)
        assert link.of("long").in_order() == kit.oracle.tokens(spec)
        await worker.left.wait()
        await link.close()
