"""A Reserve whose writer is none: no fault of the request's, and nothing else is affected."""

from __future__ import annotations

import pytest

from baton.v1 import common_pb2, worker_pb2
from cluster.pools.role_plan import Role
from cluster.worker.worker import WorkerFailedError
from kv_transfer.layout import BlockId
from kv_transfer.lease import WorkerIdentity
from tests.cluster.conftest import DecodeLink, Oracle, make_spec, nothing_held, running_worker


def writer_of(num_ranks: int) -> common_pb2.WorkerRef:
    ranks = [
        common_pb2.RankAddress(tp_rank=rank, transfer_address=b"nobody-%d" % rank)
        for rank in range(num_ranks)
    ]
    return common_pb2.WorkerRef(worker_id="writer", incarnation=1, ranks=ranks)


async def test_a_writer_without_ranks_or_of_a_width_that_does_not_fit_is_refused() -> None:
    async with running_worker("decode-0", Role.DECODE) as worker:
        link = DecodeLink(worker.address, "router-a")
        await link.open()
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
        await link.close()


async def grant_twice() -> None:
    async with running_worker("decode-0", Role.DECODE) as worker:
        link = DecodeLink(worker.address, "router-a")
        await link.open()
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
        await link.close()


async def test_blocks_that_are_granted_twice_end_the_worker_and_refuse_the_request() -> None:
    with pytest.raises(WorkerFailedError, match="writable under another lease"):
        await grant_twice()
