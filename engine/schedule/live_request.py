"""A request inside the engine: its tokens, how far its KV is, and when it is over."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

import numpy as np

from baton.finish_reason import FinishReason
from engine.kv.request_blocks import RequestBlocks
from engine.request import HandoffId, RequestId, RequestSpec, Scored, TokenLogprobs
from kv_transfer.block_hash import TokenIds


class Status(enum.Enum):
    """States of a request in the engine; a finished one is forgotten."""

    WAITING = "waiting"  # holds no blocks: new, or preempted
    RUNNING = "running"
    RESERVED = "reserved"  # another worker writes its KV
    EXPORTED = "exported"  # computes no more; its blocks are pinned until release


@dataclass(frozen=True)
class Export:
    """Where a prefill-only request's KV goes."""

    handoff_id: HandoffId
    num_receiver_blocks: int  # leading blocks that the receiver holds already


@dataclass(eq=False)
class LiveRequest:
    """Written by the `Scheduler` and the `StepDraft` it makes."""

    spec: RequestSpec
    arrival: int
    arrived_at: float
    max_len: int  # tokens, prompt and output, after which it is over, wherever that is
    blocks: RequestBlocks
    export: Export | None = None
    status: Status = Status.WAITING
    num_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # of the first placement
    num_lost_tokens: int = 0  # that were computed when it was preempted
    num_pushed_blocks: int = 0
    started_at: float | None = None
    chunks: list[tuple[int, float, float]] = field(default_factory=list)  # of an export
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the steps so far
    _tokens: TokenIds = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = len(self.spec.token_ids)
        most_tokens = self.max_len if self.export is None else self.num_tokens + 1
        self._tokens = np.zeros(most_tokens, np.uint32)
        self._tokens[: self.num_tokens] = self.spec.token_ids

    @property
    def request_id(self) -> RequestId:
        return self.spec.request_id

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: lower priority first, then earlier arrival."""
        return (self.spec.priority, self.arrival)

    @property
    def num_left(self) -> int:
        """Known tokens whose KV is not computed yet."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def decodes(self) -> bool:
        """Whether it lacks just one token. An export does not decode: it has all of its blocks."""
        return self.num_tokens - self.num_computed_tokens == 1 and self.export is None

    @property
    def is_shared(self) -> bool:
        """Whether another worker may touch its blocks. An export that waits has none."""
        if self.export is None:
            return self.status is Status.RESERVED
        return self.status is not Status.WAITING

    @property
    def tokens(self) -> TokenIds:
        """Everything known, prompt and output: uint32 [num_tokens], a view."""
        return self._tokens[: self.num_tokens]

    def scored_after(self, start: int, end: int) -> Scored | None:
        """The prompt's tokens after each of these, if it is asked how likely they are."""
        num_top, num_prompt = self.spec.sampling.prompt_logprobs, self.spec.num_prompt_tokens
        if num_top is None or self.num_tokens > num_prompt:
            return None
        return Scored(self._tokens[start + 1 : min(end + 1, num_prompt)], num_top)

    def tokens_between(self, start: int, end: int) -> TokenIds:
        return self._tokens[start:end]

    def current_spec(self) -> RequestSpec:
        """The spec from which a runner samples the next token."""
        sampling = self.spec.sampling
        if sampling.has_penalties or sampling.bad_words or self.spec.grammar is not None:
            return replace(self.spec, token_ids=self.tokens)
        return self.spec

    def append(self, token_id: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Append the next output token. Returns the reason if it is the last one."""
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        return self.spec.ended_by(token_id, self.num_tokens, self.max_len, eos_token_ids)
