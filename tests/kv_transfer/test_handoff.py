"""The same handoffs over the in-memory twin and over UCX, whose sender is a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from ctypes.util import find_library
from dataclasses import replace
from typing import Any

import pytest
from transfer_sides import LAYOUT, NUM_BLOCKS, ONE_HEAD, LocalSide, RemoteSide, Side, SideSpec

from kv_transfer.config import TransferConfig
from kv_transfer.errors import (
    CancelledHandoffError,
    FencedError,
    FingerprintError,
    HandoffTimeoutError,
    LeaseError,
    LeaseFencedError,
    NackError,
    WrongWriterError,
)
from kv_transfer.lease import FirstToken, FirstTokenLogprobs, Lease
from kv_transfer.lease_table import LeaseFailure
from kv_transfer.transport import make_transport

FIRST = FirstToken(7, FirstTokenLogprobs(-0.5, 1, ((7, -0.5), (8, -1.5))))
HERE, THERE = list(range(100, 100 + NUM_BLOCKS)), list(range(200, 200 + NUM_BLOCKS))

AnySide = LocalSide | RemoteSide
MakePair = Callable[..., Awaitable[tuple[AnySide, AnySide]]]


needs_system_ucx = pytest.mark.skipif(
    find_library("ucp") is None,
    reason="the system's libucp.so.0 (Debian: libucx0) is not installed",
)
CONFIGS = {
    "memory": TransferConfig(transport="memory"),
    "ucx": TransferConfig(),
    "ucx-python-loop": TransferConfig(native=False),
    "ucx-system": TransferConfig(ucx_library="system"),
}


@pytest.fixture(params=["memory", "ucx"])
def config(request: pytest.FixtureRequest) -> TransferConfig:
    return CONFIGS[request.param]


@pytest.fixture
async def make_pair() -> AsyncIterator[MakePair]:
    """Makes (sender, receiver), both filled, the sender in its own process when UCX moves bytes."""
    sides: list[AnySide] = []

    async def make(
        config: TransferConfig, sender_tp: int = 1, receiver_tp: int = 1, **spec: Any
    ) -> tuple[AnySide, AnySide]:
        sender_spec = SideSpec("sender", sender_tp, config=config, **spec)
        receiver_spec = SideSpec("receiver", receiver_tp, config=config, **spec)
        sender: AnySide = (
            RemoteSide(sender_spec) if config.transport == "ucx" else local(sender_spec)
        )
        sides.append(sender)
        receiver: AnySide = local(receiver_spec) if fits_here(config) else RemoteSide(receiver_spec)
        sides.append(receiver)
        for side, seeds in ((sender, HERE), (receiver, THERE)):
            await side.call("ready")
            await side.call("fill", seeds)
        return sender, receiver

    yield make
    for side in sides:
        if not isinstance(side, RemoteSide) or side.process.is_alive():
            await side.call("check_integrity")
        await side.close()


def fits_here(config: TransferConfig) -> bool:
    """Two libucp in one process would take each other's symbols, and this one has the wheel's."""
    return config.ucx_library == "wheel"


def local(spec: SideSpec) -> LocalSide:
    return LocalSide(Side(spec, [make_transport(spec.config) for _ in range(spec.tp_size)]))


async def grant(
    sender: AnySide, receiver: AnySide, blocks: list[list[int]], request_id: str = "r"
) -> Lease:
    lease: Lease = await receiver.call("grant", request_id, await sender.call("ready"), blocks)
    return lease


def after(blocks: dict[int, int]) -> list[int]:
    """The receiver's seeds once its blocks (keys) hold the sender's blocks (values)."""
    return [HERE[blocks[b]] if b in blocks else THERE[b] for b in range(NUM_BLOCKS)]


async def hand_over(sender: AnySide, receiver: AnySide, layout: Any = LAYOUT) -> Any:
    """Blocks of all groups, scattered and in runs, over region borders, in two steps."""
    targets, sources = [3, 4, 5, 17, 7, 8, 9], [9, 10, 11, 1, 6, 7, 8]
    groups = range(len(layout.groups))
    lease = await grant(sender, receiver, [targets for _ in groups])
    handoff = await sender.call("open", lease)
    for part in (slice(0, 4), slice(4, 7)):
        for group in groups:
            ordinals = list(range(7))[part]
            await sender.call("push", handoff, group, ordinals, sources[part])
    receipt = await sender.call("finish", handoff)
    assert await receiver.call("wait_for", "admitted", "r") == ("admitted", "r", FIRST)
    assert await receiver.call("count_wrong_bytes", after(dict(zip(targets, sources)))) == 0
    assert await sender.call("count_wrong_bytes", HERE) == 0
    assert await sender.call("leftovers") == (0, 0, 0)
    assert await receiver.call("leftovers") == (0, 0, 0)
    return receipt


@pytest.mark.parametrize(("sender_tp", "receiver_tp"), [(1, 1), (1, 2), (2, 1), (2, 2)])
async def test_every_byte_arrives_and_no_other_is_touched_whatever_the_widths(
    make_pair: MakePair, config: TransferConfig, sender_tp: int, receiver_tp: int
) -> None:
    sender, receiver = await make_pair(config, sender_tp, receiver_tp)
    receipt = await hand_over(sender, receiver)
    copies = {"kv": 1, "latent": receiver_tp}  # a latent is held by every rank, and sent to each
    kv_bytes = 2 * 4 * 4 * (8 + 16) * 2 * copies["kv"]
    latent_bytes = 3 * 1 * 4 * 24 * 4 * copies["latent"]
    assert receipt.num_bytes == 7 * (kv_bytes + latent_bytes)
    assert receipt.num_blocks == 14
    assert receipt.put_s > 0
    assert receipt.exposed_s > 0


@pytest.mark.parametrize(("sender_tp", "receiver_tp"), [(1, 2), (2, 1), (2, 2)])
async def test_a_replicated_head_is_sent_once_to_each_rank_that_holds_it(
    make_pair: MakePair, config: TransferConfig, sender_tp: int, receiver_tp: int
) -> None:
    sender, receiver = await make_pair(config, sender_tp, receiver_tp, layout=ONE_HEAD)
    receipt = await hand_over(sender, receiver, ONE_HEAD)
    assert receipt.num_bytes == 7 * receiver_tp * 2 * 4 * 8 * 4


@pytest.mark.parametrize(
    "name", ["ucx-python-loop", pytest.param("ucx-system", marks=needs_system_ucx)]
)
async def test_other_posters_and_libraries_move_the_same_bytes(
    make_pair: MakePair, name: str
) -> None:
    sender, receiver = await make_pair(CONFIGS[name], 2, 1)
    await hand_over(sender, receiver)


@pytest.mark.parametrize("checksum", ["sampled", "always"])
async def test_checksums_agree_between_unequal_widths(
    make_pair: MakePair, config: TransferConfig, checksum: str
) -> None:
    sender, receiver = await make_pair(replace(config, checksum=checksum), 1, 2)
    await hand_over(sender, receiver)


async def test_null_blocks_of_a_window_are_neither_pushed_nor_waited_for(
    make_pair: MakePair, config: TransferConfig
) -> None:
    sender, receiver = await make_pair(config)
    lease = await grant(sender, receiver, [[1, 2, 3], [0, 2, 3]])
    handoff = await sender.call("open", lease)
    await sender.call("push", handoff, 0, [0, 1, 2], [4, 2, 3])
    await sender.call("push", handoff, 1, [0, 1, 2], [0, 2, 3])
    receipt = await sender.call("finish", handoff)
    assert receipt.num_blocks == 5
    await receiver.call("wait_for", "admitted", "r")


async def test_a_lease_without_missing_blocks_is_admitted_with_its_first_token(
    make_pair: MakePair, config: TransferConfig
) -> None:
    sender, receiver = await make_pair(config, 2, 2)
    handoff = await sender.call("open", await grant(sender, receiver, [[], []]))
    receipt = await sender.call("finish", handoff)
    assert receipt.num_bytes == 0
    assert await receiver.call("wait_for", "admitted", "r") == ("admitted", "r", FIRST)


async def test_a_second_handoff_reuses_connections_and_blocks(
    make_pair: MakePair, config: TransferConfig
) -> None:
    sender, receiver = await make_pair(config)
    for round_ in range(3):
        lease = await grant(sender, receiver, [[1, 2], [1, 2]], f"r{round_}")
        handoff = await sender.call("open", lease)
        for group in (0, 1):
            await sender.call("push", handoff, group, [0, 1], [5 + round_, 9])
        await sender.call("finish", handoff)
        await receiver.call("wait_for", "admitted", f"r{round_}")
        assert await receiver.call("count_wrong_bytes", after({1: 5 + round_, 2: 9})) == 0


# --- faults that need no dead process -----------------------------------------------------------


async def test_a_released_lease_is_fenced_before_it_is_opened_and_never_served(
    make_pair: MakePair, config: TransferConfig
) -> None:
    sender, receiver = await make_pair(config)
    lease = await grant(sender, receiver, [[1], [1]])
    assert await receiver.call("release", lease.lease_id)
    await receiver.call("wait_for", "quiescent", "r")  # the tombstone answers for the writer
    with pytest.raises(LeaseFencedError):
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
    with pytest.raises(FencedError):
        await sender.call("finish", handoff)
    assert await receiver.call("event_names") == ["quiescent"]
    assert await sender.call("leftovers") == (0, 0, 0)
    assert await receiver.call("count_wrong_bytes", THERE) > 0  # group 0 was pushed
    seeds = after({1: 1, 2: 2})
    lease = await grant(sender, receiver, [[1, 2], [1, 2]], "again")
    handoff = await sender.call("open", lease)
    for group in (0, 1):
        await sender.call("push", handoff, group, [0, 1], [1, 2])
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
    with pytest.raises(LeaseFencedError):
        await sender.call("open", lease)
    with pytest.raises(CancelledHandoffError):
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
    with pytest.raises(FencedError):
        await sender.call("finish", handoff)
    assert await receiver.call("event_names") == ["quiescent"]


async def test_a_repeated_done_is_acknowledged_again_and_admits_once(
    make_pair: MakePair, config: TransferConfig
) -> None:
    sender, receiver = await make_pair(config)
    lease = await grant(sender, receiver, [[1], [1]])
    handoff = await sender.call("open", lease)
    for group in (0, 1):
        await sender.call("push", handoff, group, [0], [1])
    await sender.call("finish", handoff)
    await sender.call("replay_done", handoff, lease, {})
    second = await grant(sender, receiver, [[2], [2]], "second")  # a round trip behind it
    handoff = await sender.call("open", second)
    for group in (0, 1):
        await sender.call("push", handoff, group, [0], [1])
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
    lease = await grant(sender, receiver, [[1], [1]])
    handoff = await sender.call("open", lease)
    for group in (0, 1):
        await sender.call("push", handoff, group, [0], [1])
    await sender.call("replay_done", handoff, lease, changes)
    failed = await receiver.call("wait_for", "failed", "r")
    assert failed[2] is LeaseFailure.CORRUPT
    with pytest.raises((NackError, FencedError)):
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
    lease = await grant(sender, receiver, [[1, 2], [1, 2]])
    handoff = await sender.call("open", lease)
    for group in (0, 1):
        await sender.call("push", handoff, group, [0, 1], [1, 2])
    async with asyncio.timeout(10):  # until the puts, of which nobody tells, have landed
        while await receiver.call("count_wrong_bytes", after({1: 1, 2: 2})):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await receiver.call("flip_byte", 0, 2)
    with pytest.raises(NackError, match="1 of 4 checksums differ"):
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
    with pytest.raises(LeaseFencedError):
        await sender.call("open", lease)


async def test_an_engine_that_never_pushes_ends_in_a_timeout(
    make_pair: MakePair, config: TransferConfig
) -> None:
    sender, receiver = await make_pair(config)
    lease = await grant(sender, receiver, [[1], [1]])
    handoff = await sender.call("open", lease)
    with pytest.raises(HandoffTimeoutError):
        await sender.call("finish", handoff, 0.2)
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
    handoff = await sender.call("open", lease)
    with pytest.raises(LeaseError, match="already"):
        await sender.call("open", lease)
    await sender.call("cancel", handoff)


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
