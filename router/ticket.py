"""A request's position in the router's line, and its needs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from router.fleet import Booking
from router.placement import Placement
from router.prompt import PromptBlocks


@dataclass(order=True)
class Ticket:
    """A request's place in line, kept over its retries."""

    rank: tuple[int, float, int]
    """(-priority, fair share's stamp, arrival)."""
    prompt: PromptBlocks = field(compare=False)
    max_new_tokens: int = field(compare=False)
    least_new_tokens: int = field(compare=False)
    """Of these, how many must fit after the prompt: all that the client asked for."""
    tenant: str = field(compare=False, default="")
    charged: int = field(compare=False, default=0)
    """Tokens that its tenant has paid for it; given back if it is never placed."""
    owed_before: int = field(compare=False, default=0)
    """How much of its tenant's debt is older than its position in line."""
    failed: set[tuple[str, int]] = field(compare=False, default_factory=set)
    """Worker ids and incarnations on which the request failed."""
    deadline_s: float | None = field(compare=False, default=None)
    """The client's own: None when it set none."""
    was_placed: bool = field(compare=False, default=False)
    uncached_tokens: int = field(compare=False, default=0)
    """Prompt tokens to compute at the worker that holds most of it, when last looked."""
    since_s: float = field(compare=False, default=0.0)
    stranded_since_s: float | None = field(compare=False, default=None)
    """Since when no usable worker takes it; None while one does."""
    placed: asyncio.Future[Placed] | None = field(compare=False, default=None)
    explores: bool = field(compare=False, default=False)
    """Its next placement does not trust old measures of the workers' speed."""

    @property
    def num_tokens(self) -> int:
        """Of prompt and output, all that must fit where it runs."""
        return len(self.prompt) + self.least_new_tokens

    def may_fit(self, longest: float) -> bool:
        """It waits for a worker with room for this many tokens. If it is stranded, no worker's
        reach has changed since that was seen."""
        waits = self.placed is not None and not self.placed.done()
        return waits and self.stranded_since_s is None and self.num_tokens <= longest


@dataclass(frozen=True)
class Placed:
    placement: Placement
    booking: Booking
    kv_fingerprint: bytes
