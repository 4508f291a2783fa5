"""Ranks above 0 report the handoffs they hold, and rank 0 names those that should not be there."""

from __future__ import annotations

import asyncio

from handoff_pairs import MakePair, grant

from baton.config.transfer import TransferConfig
from kv_transfer.lease import Lease

MEMORY = TransferConfig(transport="memory")
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
    sender, receiver = await make_pair(MEMORY, 2, 1)
    lease: Lease = await grant(sender, receiver, BLOCKS)
    rank0, rank1 = sender.side.ranks  # type: ignore[union-attr]
    rank1.message(rank0.open_payload(lease))  # nobody asked rank 0 for it
    (problem,) = await sender.call("rank_problems")
    assert problem.startswith("rank 1: ")
    assert lease.handoff_id in problem
    rank0.cancel(lease.handoff_id)
    async with asyncio.timeout(10):
        while await sender.call("rank_problems"):  # until it has flushed
            pass


async def test_an_asker_that_goes_away_takes_no_answer_from_the_next(make_pair: MakePair) -> None:
    sender, _ = await make_pair(MEMORY, 2, 1)
    asked = asyncio.ensure_future(sender.call("rank_problems"))
    await asyncio.sleep(0)  # it has asked
    asked.cancel()
    assert await sender.call("rank_problems") == []


async def test_a_rank_of_another_worker_answers_for_none_of_ours(make_pair: MakePair) -> None:
    sender, receiver = await make_pair(MEMORY, 2, 2)
    stranger = receiver.side.ranks[1].new_message("", 0)  # type: ignore[union-attr]
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
