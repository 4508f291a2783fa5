"""Attempts that are refused, reused or ended by their writer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from baton.config.workers import DecodeConfig
from baton.fleet import Role
from baton.link.frames import LinkError
from baton.status import from_rpc_error
from baton.v1 import common_pb2, worker_pb2
from cluster.worker.worker import WorkerFailedError
from kv_transfer.layout import BlockId, TokenLogprobs
from kv_transfer.lease import FirstToken, Lease, WorkerIdentity
from tests.cluster.conftest import (
    TIMED_ENGINE,
    HeldStep,
    Oracle,
    make_spec,
    nothing_held,
    running_worker,
    until,
)
from tests.decode_worker.links import linked, paired


async def test_an_attempt_that_comes_again_within_a_step_gets_its_own_tokens() -> None:
    forgets = DecodeConfig(finished_ttl_s=0.0)
    async with (
        running_worker("decode-0", Role.DECODE, TIMED_ENGINE, decode=forgets) as worker,
        linked(worker) as link,
    ):
        role = worker.decode
        former, latter = make_spec("former", 60), make_spec("latter", 60)
        expected = Oracle().tokens(latter)
        assert Oracle().tokens(former)[0] != expected[0]
        former.request_id = latter.request_id = "x"

        step = HeldStep(worker)
        await link.reserve(former)
        await asyncio.to_thread(step.begun.wait, 10)
        await link.cancel("x")
        heard = link.of("x")
        await link.until(lambda: heard.finished)
        # The role's tables: neither step sends a message to wait for.
        await until(lambda: len(role._log) == 0)
        heard.finished = 0
        await link.reserve(latter)
        await until(lambda: len(role.runs) == 1)
        step.go_on.set()
        await link.until(lambda: heard.finished)
        assert heard.in_order() == expected
        await nothing_held(worker)


LATER_RELEASE = cast(Any, 99)  # a reason that this one does not know


async def test_a_writer_s_last_token_ends_the_request_at_its_receiver_and_is_kept() -> None:
    async with paired() as pair:
        link, exporter = pair.link, pair.prefill.exporter
        logprobs = TokenLogprobs(-0.5, 1)
        for name, reason in (
            ("known", common_pb2.FINISH_REASON_STOP),
            ("unknown", LATER_RELEASE),
        ):
            lease = await pair.router.reserve(make_spec(name), pair.writer)
            handoff = exporter.open(Lease.from_proto(lease))
            assert await exporter.cancel(handoff, FirstToken(7, logprobs, reason))
            heard = link.of(name)
            await link.until(lambda heard=heard: heard.finished or heard.rejected)  # type: ignore[misc]
        assert link.of("known").finished == common_pb2.FINISH_REASON_STOP
        assert not link.of("known").tokens  # the writer sends it to its router itself
        rejected = link.of("unknown").rejected
        assert rejected is not None
        assert rejected.reason == worker_pb2.REJECT_REASON_HANDOFF_FAILED
        attach = worker_pb2.AttachRequest(
            router_id=link.router_id, request_id="known", tenant="tenant"
        )
        kept = (await link.stub.attach(attach)).tokens
        assert list(kept.ids) == [7]
        assert kept.finished == common_pb2.FINISH_REASON_STOP


def unknown_token(spec: worker_pb2.RequestSpec) -> None:
    spec.token_ids = spec.token_ids[:-4] + b"\xff\xff\x00\x00"


def half_a_token(spec: worker_pb2.RequestSpec) -> None:
    spec.token_ids = spec.token_ids[:-2]


def more_prompt_than_tokens(spec: worker_pb2.RequestSpec) -> None:
    spec.num_prompt_tokens += 1


def improbable(spec: worker_pb2.RequestSpec) -> None:
    spec.sampling.top_p = 2.0


WRONG = (
    (unknown_token, "token_ids", "INVALID_PROMPT"),
    (half_a_token, "token_ids", "INVALID_PROMPT"),
    (more_prompt_than_tokens, "num_prompt_tokens", "INVALID_REQUEST"),
    (improbable, "sampling.top_p", "INVALID_SAMPLING"),
)


def wrong(
    request_id: str, spoil: Callable[[worker_pb2.RequestSpec], None]
) -> worker_pb2.RequestSpec:
    spec = make_spec(request_id)
    spoil(spec)
    return spec


async def test_a_worker_that_refuses_a_request_names_the_field() -> None:
    async with paired() as pair:
        link, router, writer = pair.link, pair.router, pair.writer
        for number, (spoil, field, reason) in enumerate(WRONG):
            for name, named in ((f"local-{number}", None), (f"apart-{number}", writer)):
                await link.reserve(wrong(name, spoil), named)
                heard = link.of(name)
                await link.until(lambda heard=heard: heard.rejected)  # type: ignore[misc]
                assert heard.rejected is not None
                assert heard.rejected.reason == worker_pb2.REJECT_REASON_INVALID
                assert heard.rejected.field == field
            lease = await router.reserve(make_spec(f"good-{number}"), writer)
            with pytest.raises(LinkError) as caught:
                await router.hand_off(wrong(f"good-{number}", spoil), lease)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            refused = from_rpc_error(caught.value)
            assert (refused.field, refused.reason) == (field, reason)
            await link.cancel(f"good-{number}")


def writer_of(num_ranks: int) -> common_pb2.WorkerRef:
    ranks = [
        common_pb2.RankAddress(tp_rank=rank, transfer_address=b"nobody-%d" % rank)
        for rank in range(num_ranks)
    ]
    return common_pb2.WorkerRef(worker_id="writer", incarnation=1, ranks=ranks)


async def test_a_writer_without_ranks_or_of_a_width_that_does_not_fit_is_refused() -> None:
    async with running_worker("decode-0", Role.DECODE) as worker, linked(worker) as link:
        for num_ranks in (0, 3):
            name = f"ranks-{num_ranks}"
            await link.reserve(make_spec(name), writer_of(num_ranks))
            heard = link.of(name)
            await link.until(lambda heard=heard: heard.rejected or heard.reserved)  # type: ignore[misc]
            assert heard.rejected is not None, heard.reserved
            assert heard.rejected.reason == worker_pb2.REJECT_REASON_INTERNAL
            assert "ranks" in heard.rejected.message
            await nothing_held(worker)
        spec = make_spec("good")
        await link.reserve(spec)
        await link.until(lambda: link.of("good").finished)
        assert link.of("good").in_order() == Oracle().tokens(spec)


async def grant_twice() -> None:
    async with running_worker("decode-0", Role.DECODE) as worker, linked(worker) as link:
        every_block = [BlockId(block) for block in range(1, 768)]
        lease = worker.leases.grant(
            "the engine does not know",
            WorkerIdentity.from_proto(writer_of(1)),
            [every_block] * len(worker.rank.model.layout.groups),
            0,
            60.0,
        )
        await link.reserve(make_spec("again"), writer_of(1))
        heard = link.of("again")
        await link.until(lambda: heard.rejected)
        assert heard.rejected is not None
        assert heard.rejected.reason == worker_pb2.REJECT_REASON_INTERNAL
        worker.leases.release(lease.lease_id)
        await worker.left.wait()


async def test_blocks_that_are_granted_twice_end_the_worker_and_refuse_the_request() -> None:
    with pytest.raises(WorkerFailedError, match="writable under another lease"):
        await grant_twice()
