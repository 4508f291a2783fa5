"""What the ranks above 0 hold: rank 0 asks them, for no other than they themselves can tell.

A rank lets go of a handoff before it reports that it has drained, and rank 0 forgets none before
every rank has: what a rank holds is open at rank 0, whenever its answer is read. For its messages
are read in the order in which they were sent.

Lives on rank 0's event loop; not thread-safe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container

from baton.v1 import transfer_pb2
from kv_transfer.layout import HandoffId
from kv_transfer.rank import TransferRank

_ANSWER_S = 5.0


class RankBooks:
    """Asks every rank above 0 which handoffs it holds. `open_here`: those of rank 0's exporter."""

    def __init__(self, rank: TransferRank, open_here: Container[HandoffId]) -> None:
        self._rank = rank
        self._open_here = open_here
        self._waiting: dict[int, set[asyncio.Future[str]]] = {
            other.tp_rank: set() for other in rank.identity.ranks[1:]
        }

    async def problems(self) -> list[str]:
        """One line for each rank that holds what is not open here, or does not answer in time."""
        loop = asyncio.get_running_loop()
        answers: dict[int, asyncio.Future[str]] = {r: loop.create_future() for r in self._waiting}
        for other in self._rank.identity.ranks[1:]:
            self._waiting[other.tp_rank].add(answers[other.tp_rank])
            question = self._rank.new_message("", 0)
            question.rank_books_asked.SetInParent()
            self._rank.send(other.transfer_address, question)
        try:
            if answers:
                await asyncio.wait(answers.values(), timeout=_ANSWER_S)
        finally:  # also of a call whose asker has gone
            for rank, answer in answers.items():
                self._waiting[rank].discard(answer)
        found = []
        for rank, answer in answers.items():
            silent = f"it has not told what it holds within {_ANSWER_S:g} s"
            problem = answer.result() if answer.done() else silent
            if problem:
                found.append(f"rank {rank}: {problem}")
        return found

    def told(self, message: transfer_pb2.TransferMessage) -> None:
        """A rank's answer: judged now, before what it sent later is read."""
        identity = self._rank.identity
        sender = (message.sender_worker_id, message.sender_incarnation)
        if sender != (identity.worker_id, identity.incarnation):
            return
        strays = [h for h in message.rank_books.handoffs if h not in self._open_here]
        problem = f"it holds handoffs that are over or unknown: {strays}" if strays else ""
        for answer in self._waiting.get(message.sender_rank, ()):
            if not answer.done():
                answer.set_result(problem)
