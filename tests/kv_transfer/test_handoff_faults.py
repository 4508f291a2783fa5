"""Handoffs that end badly without a dead process, over the in-memory twin and over UCX."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from handoff_pairs import CONFIGS, THERE, MakePair, after, grant, pushed
from transfer_sides import NUM_BLOCKS

from baton.config.transfer import TransferConfig
from baton.v1 import common_pb2
from kv_transfer.errors import (
    FingerprintError,
    HandoffError,
    LeaseError,
    LeaseServedError,
    WrongWriterError,
)
from kv_transfer.lease import WorkerIdentity
from kv_transfer.lease_table import LeaseFailure
from kv_transfer.routes import Route


async def test_a_released_lease_is_fenced_before_it_is_opened_and_never_served(
    make_pair: MakePair, config: TransferConfig
) -> None:
    sender, receiver = await make_pair(config)
    lease = await grant(sender, receiver, [[1], [1]])
    assert await receiver.call("release", lease.lease_id)
    await receiver.call("wait_for", "quiescent", "r")  # the tombstone answers for the writer
    with pytest.raises(LeaseServedError, match="over"):
        await sender.call("open", lease)
    assert await receiver.call("event_names") == ["quiescent"]
    assert await receiver.call("leftovers") == (0, 0, 0)


async def test_a_fence_in_the_middle_of_a_push_drains_and_then_frees(
    make_pair: MakePair, config: TransferConfig
) -> None:
    sender, receiver = await make_pair(config, 2, 2)
    lease = await grant(sender, receiver, [[1, 2], [1, 2]])
    handoff = await sender.call("open", lease)
    await sender.call("push", handoff, 0, [0, 1], [1, 2])
    assert await receiver.call("release", lease.lease_id)
    assert not await receiver.call("release", lease.lease_id)
    await receiver.call("wait_for", "quiescent", "r")
    await sender.call("push", handoff, 1, [0, 1], [1, 2])  # the engine does not know yet
    with pytest.raises(HandoffError, match="FENCED"):
        await sender.call("finish", handoff)
    assert await receiver.call("event_names") == ["quiescent"]
    assert await sender.call("leftovers") == (0, 0, 0)
    assert await receiver.call("count_wrong_bytes", THERE) > 0  # group 0 was pushed
    seeds = after({1: 1, 2: 2})
    _, handoff = await pushed(sender, receiver, [1, 2], [1, 2], "again")
    await sender.call("finish", handoff)
    assert await receiver.call("count_wrong_bytes", seeds) == 0


async def test_a_cancelled_handoff_drains_on_every_rank_and_frees_the_receivers_blocks(
    make_pair: MakePair, config: TransferConfig
) -> None:
    sender, receiver = await make_pair(config, 2, 1)
    lease = await grant(sender, receiver, [[1, 2], [1, 2]])
    handoff = await sender.call("open", lease)
    await sender.call("push", handoff, 0, [0], [1])
    await sender.call("cancel", handoff)
    assert await sender.call("leftovers") == (0, 0, 0)
    failed = await receiver.call("wait_for", "failed", "r")
    assert failed[2] is LeaseFailure.WRITER_FAILED
    await receiver.call("wait_for", "quiescent", "r")
    with pytest.raises(LeaseServedError, match="over"):
        await sender.call("open", lease)
    with pytest.raises(HandoffError, match="CANCELLED"):
        await sender.call("finish", handoff)


async def test_a_done_for_a_fenced_lease_is_refused(
    make_pair: MakePair, config: TransferConfig
) -> None:
    sender, receiver = await make_pair(config)
    lease = await grant(sender, receiver, [[1], [1]])
    handoff = await sender.call("open", lease)
    await receiver.call("release", lease.lease_id)
    await receiver.call("wait_for", "quiescent", "r")
    await sender.call("replay_done", handoff, lease, {})
    with pytest.raises(HandoffError, match="FENCED"):
        await sender.call("finish", handoff)
    assert await receiver.call("event_names") == ["quiescent"]


async def test_a_repeated_done_is_acknowledged_again_and_admits_once(
    make_pair: MakePair, config: TransferConfig
) -> None:
    sender, receiver = await make_pair(config)
    lease, handoff = await pushed(sender, receiver, [1], [1])
    await sender.call("finish", handoff)
    await sender.call("replay_done", handoff, lease, {})
    _, handoff = await pushed(sender, receiver, [2], [1], "second")  # a round trip behind it
    await sender.call("finish", handoff)
    assert await receiver.call("event_names") == ["admitted", "admitted"]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_bytes": 1},
        {"num_blocks": 3},
        {"num_source_ranks": 2},
        {"kv_fingerprint": b"another"},
        {"target_rank": 1},
        {"sender_rank": 1},
        {"checksum_stride": 1},  # and no checksums
        {"checksum_stride": 1, "num_writer_ranks": 3},  # over which the heads cannot be split
        {"checksum_stride": 1, "num_writer_ranks": 0},
    ],
)
async def test_a_done_that_is_not_as_it_must_be_fails_the_lease(
    make_pair: MakePair, config: TransferConfig, changes: dict[str, Any]
) -> None:
    if config.transport == "ucx":
        config = CONFIGS["memory"]  # the wire makes no difference to what is compared
    sender, receiver = await make_pair(config)
    lease, handoff = await pushed(sender, receiver, [1], [1])
    await sender.call("replay_done", handoff, lease, changes)
    failed = await receiver.call("wait_for", "failed", "r")
    assert failed[2] is LeaseFailure.CORRUPT
    with pytest.raises(HandoffError, match=r"NACK|FENCED"):
        await sender.call("finish", handoff)
    await receiver.call("wait_for", "quiescent", "r")


@pytest.mark.parametrize(
    "changes",
    [{"sender_incarnation": 2}, {"sender_worker_id": "thief"}, {"lease_epoch": 99}],
)
async def test_a_done_from_anyone_but_the_named_writer_admits_nothing(
    make_pair: MakePair, changes: dict[str, Any]
) -> None:
    sender, receiver = await make_pair(CONFIGS["memory"])
    lease = await grant(sender, receiver, [[1], [1]])
    handoff = await sender.call("open", lease)
    await sender.call("replay_done", handoff, lease, changes)
    for group in (0, 1):
        await sender.call("push", handoff, group, [0], [1])
    await sender.call("finish", handoff)  # the rightful one is served as ever
    assert await receiver.call("event_names") == ["admitted"]


async def test_damaged_bytes_are_found_by_the_checksum(
    make_pair: MakePair, config: TransferConfig
) -> None:
    sender, receiver = await make_pair(replace(config, checksum="always"))
    _, handoff = await pushed(sender, receiver, [1, 2], [1, 2])
    async with asyncio.timeout(10):  # until the puts have landed: no event reports that
        while await receiver.call("count_wrong_bytes", after({1: 1, 2: 2})):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await receiver.call("flip_byte", 0, 2)
    with pytest.raises(HandoffError, match=r"NACK: 1 of 4 checksums differ|FENCED"):
        await sender.call("finish", handoff)  # the table's fence may overtake the answer
    assert (await receiver.call("wait_for", "failed", "r"))[2] is LeaseFailure.CORRUPT
    await receiver.call("wait_for", "quiescent", "r")


@pytest.mark.parametrize("tp_size", [1, 2])
async def test_a_writer_that_hands_over_less_than_it_owes_is_not_admitted(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, tp_size: int
) -> None:
    whole = Route.runs

    def half(route: Route, group: int, sources: Any, targets: Any) -> Any:
        return whole(route, group, sources[: len(sources) // 2], targets[: len(targets) // 2])

    monkeypatch.setattr(Route, "runs", half)
    sender, receiver = await make_pair(CONFIGS["memory"], tp_size, 1)
    _, handoff = await pushed(sender, receiver, [1, 2], [1, 2])
    with pytest.raises(HandoffError, match=r"NACK: done reports|FENCED"):
        await sender.call("finish", handoff)
    assert (await receiver.call("wait_for", "failed", "r"))[2] is LeaseFailure.CORRUPT
    await receiver.call("wait_for", "quiescent", "r")


async def test_a_lease_whose_writer_is_silent_expires_and_is_freed_by_its_tombstone(
    make_pair: MakePair, config: TransferConfig
) -> None:
    sender, receiver = await make_pair(replace(config, renew_within_s=0.2))
    lease = await grant(sender, receiver, [[1], [1]])
    assert (await receiver.call("wait_for", "failed", "r"))[2] is LeaseFailure.EXPIRED
    await receiver.call("wait_for", "quiescent", "r")
    with pytest.raises(LeaseServedError, match="over"):
        await sender.call("open", lease)


async def test_an_engine_that_never_pushes_ends_in_a_timeout(
    make_pair: MakePair, config: TransferConfig
) -> None:
    sender, receiver = await make_pair(replace(config, ack_timeout_s=0.2))
    lease = await grant(sender, receiver, [[1], [1]])
    handoff = await sender.call("open", lease)
    with pytest.raises(HandoffError, match="TIMEOUT"):
        await sender.call("finish", handoff)
    assert (await receiver.call("wait_for", "failed", "r"))[2] is LeaseFailure.WRITER_FAILED
    await receiver.call("wait_for", "quiescent", "r")


async def test_leases_that_cannot_be_served_are_refused_by_name(make_pair: MakePair) -> None:
    sender, receiver = await make_pair(CONFIGS["memory"])
    lease = await grant(sender, receiver, [[1], [1]])
    with pytest.raises(FingerprintError):
        await sender.call("open", replace(lease, kv_fingerprint=b"other"))
    with pytest.raises(WrongWriterError):
        await sender.call("open", replace(lease, writer=replace(lease.writer, incarnation=2)))
    with pytest.raises(LeaseError, match="block tables"):
        await sender.call("open", replace(lease, block_ids=((),)))
    rank = lease.ranks[0]
    small = replace(rank, regions=tuple(replace(r, num_bytes=10) for r in rank.regions))
    with pytest.raises(LeaseError, match="bytes"):
        await sender.call("open", replace(lease, ranks=(small,)))
    ranks = tuple(replace(lease.owner.ranks[0], tp_rank=rank) for rank in range(3))
    offers = tuple(replace(rank, tp_rank=number) for number in range(3))
    wide = replace(lease, owner=replace(lease.owner, ranks=ranks), ranks=offers)
    with pytest.raises(LeaseError, match="do not fit 3 ranks"):
        await sender.call("open", wide)
    handoff = await sender.call("open", lease)
    with pytest.raises(LeaseError, match="already"):
        await sender.call("open", lease)
    await sender.call("cancel", handoff)


async def test_a_writer_whose_ranks_cannot_share_the_heads_is_granted_nothing(
    make_pair: MakePair,
) -> None:
    sender, receiver = await make_pair(CONFIGS["memory"])
    writer = await sender.call("ready")
    ranks = tuple(replace(writer.ranks[0], tp_rank=rank) for rank in range(3))
    with pytest.raises(LeaseError, match="do not fit 3 ranks"):
        await receiver.call("grant", "r", replace(writer, ranks=ranks), [[1], [1]])
    assert await receiver.call("leftovers") == (0, 0, 0)
    await receiver.call("check_integrity")
    await grant(sender, receiver, [[1], [1]])  # the same blocks


def test_a_worker_without_ranks_in_order_or_without_an_address_is_none() -> None:
    process = common_pb2.RankAddress(tp_rank=0, transfer_address=b"here")
    for ranks in ([], [common_pb2.RankAddress(tp_rank=1, transfer_address=b"here")]):
        with pytest.raises(ValueError, match="ranks"):
            WorkerIdentity.from_proto(common_pb2.WorkerRef(worker_id="w", ranks=ranks))
    assert WorkerIdentity.from_proto(common_pb2.WorkerRef(worker_id="w", ranks=[process]))
    process.transfer_address = b""
    with pytest.raises(ValueError, match="transfer address"):
        WorkerIdentity.from_proto(common_pb2.WorkerRef(worker_id="w", ranks=[process]))


async def test_a_lease_that_names_a_block_outside_its_regions_fails_the_handoff(
    make_pair: MakePair,
) -> None:
    sender, receiver = await make_pair(CONFIGS["memory"])
    lease = replace(await grant(sender, receiver, [[1], [1]]), block_ids=((NUM_BLOCKS,), (1,)))
    handoff = await sender.call("open", lease)
    await sender.call("push", handoff, 0, [0], [1])
    with pytest.raises(Exception, match="none of the offered regions"):
        await sender.call("finish", handoff)
    assert await receiver.call("count_wrong_bytes", THERE) == 0


async def test_granting_a_block_twice_is_our_own_bug(make_pair: MakePair) -> None:
    sender, receiver = await make_pair(CONFIGS["memory"])
    await grant(sender, receiver, [[1, 2], [1]])
    with pytest.raises(AssertionError, match="writable under another lease"):
        await grant(sender, receiver, [[2], [3]], "other")
