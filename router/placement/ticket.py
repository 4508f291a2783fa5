"""A request in the router's line: its tokens with their block hashes, and its needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.errors import BatonError
from kv_transfer.block_hash import (
    HASH_BYTES,
    BlockHash,
    CacheScope,
    TokenIds,
    chain_hashes,
    chain_root,
)
from router.fleet.fleet import Booking
from router.placement.placement import Placement


class PromptBlocks:
    """Own a request's known tokens: the prompt first, then emitted ones. Hashes are kept per
    (kv_fingerprint, block_size) and only extended, never computed twice."""

    def __init__(self, prompt: TokenIds, scope: CacheScope) -> None:
        self.num_prompt_tokens = len(prompt)
        self._tokens = np.ascontiguousarray(prompt, dtype=np.uint32)
        self._scope = scope
        self._hashes: dict[tuple[bytes, int], bytes] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def num_public_tokens(self) -> int:
        """Leading tokens of the prompt that all tenants share."""
        return self._scope.num_public_tokens

    @property
    def wire_tokens(self) -> bytes:
        """All known tokens as little-endian uint32."""
        return self._tokens.astype("<u4", copy=False).tobytes()

    def extend_to(self, emitted: Sequence[int]) -> None:
        """Bring the known tokens up to prompt + `emitted` (all tokens emitted so far)."""
        new = emitted[len(self._tokens) - self.num_prompt_tokens :]
        if new:
            self._tokens = np.concatenate([self._tokens, np.asarray(new, dtype=np.uint32)])

    def hashes(self, kv_fingerprint: bytes, block_size: int) -> bytes:
        """Hashes of all full blocks, parents first, concatenated."""
        known = self._hashes.get((kv_fingerprint, block_size), b"")
        num_known = len(known) // HASH_BYTES
        if (num_known + 1) * block_size <= len(self._tokens):
            parent = BlockHash(known[-HASH_BYTES:]) if known else chain_root(kv_fingerprint)
            rest = self._tokens[num_known * block_size :]
            known += chain_hashes(parent, self._scope, rest, block_size, num_known)
            self._hashes[kv_fingerprint, block_size] = known
        return known


@dataclass(order=True)
class Ticket:
    """A request's position in line, kept over its retries."""

    rank: tuple[int, float, int]
    """(urgency among all tenants' requests, fair share's stamp, arrival)."""
    prompt: PromptBlocks = field(compare=False)
    max_new_tokens: int = field(compare=False)
    least_new_tokens: int = field(compare=False)
    """Of these, how many must fit after the prompt: all that the client asked for."""
    tenant: str = field(compare=False, default="")
    priority: int = field(compare=False, default=0)
    """Among its tenant's own requests, lowest first."""
    session: tuple[str, str] | None = field(compare=False, default=None)
    """Its tenant and session id; None: it is of no session."""
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
    answer: Callable[[Placed | BatonError], None] | None = field(compare=False, default=None)
    """Called once with its placement, or why it gets none; None: it is not in line."""
    explores: bool = field(compare=False, default=False)
    """Its next placement does not trust old measures of the workers' speed."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output that must fit where it runs."""
        return len(self.prompt) + self.least_new_tokens

    def may_fit(self, longest: float) -> bool:
        """It waits for a worker with room for this many tokens. If it is stranded, no worker's
        reach has changed since that was seen."""
        return self.stranded_since_s is None and self.num_tokens <= longest


@dataclass(frozen=True)
class Placed:
    placement: Placement
    booking: Booking
