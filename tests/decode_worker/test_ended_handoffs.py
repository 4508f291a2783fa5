"""A handoff that its first token ends: the writer's word is all that comes of it."""

from __future__ import annotations

from typing import Any, cast

from baton.v1 import common_pb2, worker_pb2
from cluster.pools.role_plan import Role
from kv_transfer.lease import FirstToken, FirstTokenLogprobs, Lease
from tests.cluster.conftest import (
    DecodeLink,
    MiniRouter,
    make_spec,
    nothing_held,
    running_worker,
)

LATER_RELEASE = cast(Any, 99)  # a reason that this one does not know


async def test_a_writer_s_last_token_ends_the_request_at_its_receiver_and_is_kept() -> None:
    async with (
        running_worker("prefill-0", Role.PREFILL) as prefill,
        running_worker("decode-0", Role.DECODE) as decode,
    ):
        link = DecodeLink(decode.address, "router-a/1")
        await link.open()
        router = MiniRouter(prefill.address, link)
        logprobs = FirstTokenLogprobs(-0.5, 1)
        for name, reason in (
            ("known", common_pb2.FINISH_REASON_STOP),
            ("unknown", LATER_RELEASE),
        ):
            lease = await router.reserve(make_spec(name), prefill.info().ref)
            handoff = prefill.exporter.open(Lease.from_proto(lease))
            assert await prefill.exporter.cancel(handoff, FirstToken(7, logprobs, reason))
            heard = link.of(name)
            await link.until(lambda heard=heard: heard.finished or heard.rejected)  # type: ignore[misc]
        assert link.of("known").finished == common_pb2.FINISH_REASON_STOP
        assert not link.of("known").tokens  # the writer tells its router itself
        rejected = link.of("unknown").rejected
        assert rejected is not None
        assert rejected.reason == worker_pb2.REJECT_REASON_HANDOFF_FAILED
        attach = worker_pb2.AttachRequest(
            router_id=link.router_id, request_id="known", tenant="tenant"
        )
        kept = (await link.stub.Attach(attach)).tokens
        assert list(kept.ids) == [7]
        assert kept.finished == common_pb2.FINISH_REASON_STOP
        await nothing_held(prefill, decode)
        await router.close()
        await link.close()
