"""Whether a worker's books agree with each other, and what it holds: what CheckIntegrity tells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from baton.v1 import worker_pb2
from engine.api import Engine, EngineLoad
from engine.request import EngineEvent, PrefilledEvent, TokenEvent


def problems_of(parts: Mapping[str, Callable[[], None]]) -> list[str]:
    """Run every part's check; one line for each that fails."""
    problems = []
    for name, check in parts.items():
        try:
            check()
        except AssertionError as error:
            problems.append(f"{name}: {error or 'its check failed'}")
    return problems


@dataclass(frozen=True)
class EngineBooks:
    load: EngineLoad
    problems: list[str]

    @staticmethod
    def of(engine: Engine) -> EngineBooks:
        """On the engine's thread."""
        return EngineBooks(engine.load(), problems_of({"engine": engine.check_integrity}))


class TokenCount:
    """How many tokens this worker's engine has sampled: one that is counted twice was run twice."""

    def __init__(self) -> None:
        self.num_first = 0
        self.num_later = 0

    def on_events(self, events: Iterable[EngineEvent]) -> None:
        for event in events:
            self.num_first += isinstance(event, PrefilledEvent)
            self.num_later += isinstance(event, TokenEvent)


def report(
    books: EngineBooks,
    problems: list[str],
    tokens: TokenCount,
    num_open_leases: int,
    num_open_handoffs: int,
) -> worker_pb2.CheckIntegrityResponse:
    """`problems`: those of the parts above the engine."""
    load = books.load
    return worker_pb2.CheckIntegrityResponse(
        problems=books.problems + problems,
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        num_reserved=load.num_reserved,
        num_exporting=load.num_exporting,
        num_open_leases=num_open_leases,
        num_open_handoffs=num_open_handoffs,
        num_blocks_in_use=load.num_blocks - load.num_free_blocks,
        num_quarantined_blocks=load.num_quarantined_blocks,
        num_steps=load.num_steps,
        num_first_tokens=tokens.num_first,
        num_later_tokens=tokens.num_later,
    )
