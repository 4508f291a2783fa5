"""The same handoffs over the in-memory twin and over UCX: all arrives, and nothing else changes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from handoff_pairs import (
    CONFIGS,
    FIRST,
    MakePair,
    after,
    grant,
    hand_over,
    needs_system_ucx,
    pushed,
)
from transfer_sides import ONE_HEAD

from baton.config.transfer import TransferConfig
from baton.v1 import transfer_pb2
from kv_transfer.admission import Decision, Event, Mailbox
from kv_transfer.exporter import Exporter
from kv_transfer.lease import Lease
from kv_transfer.rank import TransferRank


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


@needs_system_ucx
async def test_the_systems_library_moves_the_same_bytes(make_pair: MakePair) -> None:
    sender, receiver = await make_pair(CONFIGS["ucx-system"], 2, 1)
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
        _, handoff = await pushed(sender, receiver, [1, 2], [5 + round_, 9], f"r{round_}")
        await sender.call("finish", handoff)
        await receiver.call("wait_for", "admitted", f"r{round_}")
        assert await receiver.call("count_wrong_bytes", after({1: 5 + round_, 2: 9})) == 0


async def test_the_table_learns_of_an_admission_before_the_answer_leaves(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer may act on an `Ack` at once: have its blocks granted again, for one."""
    order: list[str] = []
    put, send = Mailbox.put, TransferRank.send

    def noted_put(mailbox: Mailbox, *events: Event) -> None:
        order.extend("reported" for event in events if isinstance(event, Decision))
        put(mailbox, *events)

    def noted_send(
        rank: TransferRank, address: bytes, message: transfer_pb2.TransferMessage
    ) -> None:
        if message.HasField("ack"):
            order.append("answered")
        send(rank, address, message)

    monkeypatch.setattr(Mailbox, "put", noted_put)
    monkeypatch.setattr(TransferRank, "send", noted_send)
    await hand_over(*await make_pair(CONFIGS["ucx"]))
    assert order[:2] == ["reported", "answered"]


@pytest.mark.parametrize("name", ["memory", "ucx"])
async def test_a_registered_pool_takes_the_same_handoffs_as_an_allocated_one(
    make_pair: MakePair, name: str
) -> None:
    config = replace(CONFIGS[name], checksum="always")
    sender, receiver = await make_pair(config, 1, 2, device="cpu")
    await hand_over(sender, receiver)


@pytest.mark.gpu
@pytest.mark.parametrize("checksum", ["off", "sampled", "always"])
async def test_a_pool_on_a_gpu_takes_the_same_handoffs_as_one_on_a_cpu(
    make_pair: MakePair, checksum: str
) -> None:
    sender, receiver = await make_pair(
        replace(CONFIGS["ucx"], checksum=checksum),
        1,
        1,
        device=f"cuda:{torch.cuda.current_device()}",
    )
    await hand_over(sender, receiver)


# --- what the ranks above 0 say they hold ---------------------------------------------------------

BLOCKS = [[3, 4], [3, 4]]


async def test_a_handoff_that_is_open_is_no_fault_of_the_rank_that_holds_it(
    make_pair: MakePair, config: TransferConfig
) -> None:
    sender, receiver = await make_pair(config, 2, 1)
    handoff = await sender.call("open", await grant(sender, receiver, BLOCKS))
    assert await sender.call("rank_problems") == []
    await sender.call("cancel", handoff)
    assert await sender.call("leftovers") == (0, 0, 0)
    assert await sender.call("rank_problems") == []


async def test_a_handoff_that_only_a_rank_above_0_holds_is_named_with_the_rank(
    make_pair: MakePair,
) -> None:
    sender, receiver = await make_pair(CONFIGS["memory"], 2, 1)
    lease: Lease = await grant(sender, receiver, BLOCKS)
    rank0, rank1 = sender.side.ranks  # type: ignore[union-attr]
    rank1.message(Exporter.opening(lease))  # nobody asked rank 0 for it
    (problem,) = await sender.call("rank_problems")
    assert problem.startswith("rank 1: ")
    assert lease.handoff_id in problem
    rank0.cancel(lease.handoff_id)
    async with asyncio.timeout(10):
        while await sender.call("rank_problems"):  # until it has flushed
            pass


async def test_an_asker_that_goes_away_takes_no_answer_from_the_next(make_pair: MakePair) -> None:
    sender, _ = await make_pair(CONFIGS["memory"], 2, 1)
    asked = asyncio.ensure_future(sender.call("rank_problems"))
    await asyncio.sleep(0)  # it has asked
    asked.cancel()
    assert await sender.call("rank_problems") == []


async def test_an_asker_that_has_waited_too_long_takes_no_answer_from_a_later_one(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, _ = await make_pair(CONFIGS["memory"], 2, 1)
    held = sender.side.exporter.held_handoffs  # type: ignore[union-attr]
    rank1 = sender.side.ranks[1]  # type: ignore[union-attr]
    answer, rank1._report_held = rank1._report_held, lambda: None
    askers = []
    for limit_s in (0.05, 30.0):
        monkeypatch.setattr("kv_transfer.exporter._ANSWER_S", limit_s)
        askers.append(asyncio.ensure_future(held.problems()))
        await asyncio.sleep(0)  # it has asked
    (problem,) = await askers[0]
    assert problem.startswith("rank 1: it did not answer")
    answer()
    async with asyncio.timeout(10):
        assert await askers[1] == []


async def test_a_rank_of_another_worker_answers_for_none_of_ours(make_pair: MakePair) -> None:
    sender, receiver = await make_pair(CONFIGS["memory"], 2, 2)
    stranger = receiver.side.ranks[1].new_message()  # type: ignore[union-attr]
    stranger.rank_books.handoffs.append("unheard of")
    held = sender.side.exporter.held_handoffs  # type: ignore[union-attr]
    rank1 = sender.side.ranks[1]  # type: ignore[union-attr]
    # A rank that answers only when the test says so.
    answer, rank1._report_held = rank1._report_held, lambda: None
    asked = asyncio.ensure_future(held.problems())
    await asyncio.sleep(0)  # it has asked
    held.answered(stranger)
    assert not asked.done()
    answer()
    assert await asked == []
