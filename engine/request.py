"""Values that cross the engine's boundary: what a request asks for, what a step gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, NewType

import numpy as np
import numpy.typing as npt

from baton.finish_reason import FinishReason
from kv_transfer.block_hash import SHARED_BY_ALL, BlockHash, CacheScope, TokenIds
from kv_transfer.layout import BlockId
from kv_transfer.layout import BlockPush as BlockPush
from kv_transfer.layout import HandoffId as HandoffId  # given out by the exporter
from kv_transfer.layout import TokenLogprobs as TokenLogprobs

RequestId = NewType("RequestId", str)


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen, with every default filled in. `admission` checks it."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int = 16
    min_tokens: int = 0
    logprobs: int | None = None
    """None: no log-probabilities; n: the sampled token's and the n likeliest."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens, beside `logprobs`; it then shares no cached blocks."""
    ignore_eos: bool = False
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), each id once."""
    allowed_tokens: bytes = b""
    """Bit t % 8 of byte t // 8: whether token t may be sampled. Empty: all may."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token ids whose last one may not follow the others in the output."""

    @property
    def has_penalties(self) -> bool:
        """Whether sampling itself looks at the tokens so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @cached_property
    def biases(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """`logit_bias` as columns: ids and values."""
        ids, values = [t for t, _ in self.logit_bias], [bias for _, bias in self.logit_bias]
        return np.array(ids, np.int64), np.array(values, np.float32)

    def ends_of_bad_words(self, output: npt.NDArray[Any]) -> frozenset[int]:
        """Return the tokens that would complete a bad word after this output."""
        if not self.bad_words:
            return frozenset()
        tail = tuple(output[-max(map(len, self.bad_words)) :].tolist())
        ends = (w[-1] for w in self.bad_words if tail[len(tail) - len(w) + 1 :] == w[:-1])
        return frozenset(ends)


@dataclass(frozen=True)
class RequestSpec:
    """One request as the engine runs it.

    `token_ids` is the prompt followed by the tokens that earlier attempts emitted (none on a first
    attempt): they are prefilled, never sampled again, and sampling goes on at output index
    `len(token_ids) - num_prompt_tokens`.
    """

    request_id: RequestId
    token_ids: TokenIds
    num_prompt_tokens: int
    sampling: SamplingParams
    scope: CacheScope = SHARED_BY_ALL
    priority: int = 0
    grammar: str | None = None
    """What the output must be, as llguidance reads it; see `engine.sampling.constraints`."""

    @property
    def num_emitted_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def ended_by(
        self, token_id: int, num_tokens: int, max_len: int, eos_token_ids: frozenset[int]
    ) -> FinishReason | None:
        """Why `token_id`, the last of `num_tokens` known ones, is the request's last; else None."""
        sampling = self.sampling
        # Up to min_tokens the sampler gives no such token; one sampled elsewhere is held to it too.
        if num_tokens - self.num_prompt_tokens > sampling.min_tokens and (
            token_id in sampling.stop_token_ids
            or (token_id in eos_token_ids and not sampling.ignore_eos)
        ):
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= max_len else None

    def forbidden(self, index: int, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Return the tokens that must not be output token `index`: what ends a bad word and, before
        `min_tokens`, the output. `token_ids` are complete if there are bad words."""
        sampling, denied = self.sampling, frozenset[int]()
        if index < sampling.min_tokens:
            ends = frozenset() if sampling.ignore_eos else eos_token_ids
            denied = sampling.stop_token_ids | ends
        return denied | sampling.ends_of_bad_words(self.token_ids[self.num_prompt_tokens :])


@dataclass(frozen=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None = None
    fault: str = ""
    """Why the request cannot go on: its constraint failed. The token is none then."""


# --- what the engine reports to its worker, in order; one batch a step --------------------------


@dataclass(frozen=True)
class TokenEvent:
    """One new token of a request that decodes here."""

    request_id: RequestId
    index: int  # position in the output, counted over all attempts
    token: SampledToken
    finished: FinishReason | None = None
    num_cached_tokens: int = 0  # of the prompt, when it was first placed


@dataclass(frozen=True)
class FinishedEvent:
    """A request ended without a new token: aborted, or (ERROR) it cannot go on by its own fault,
    which `message` says."""

    request_id: RequestId
    reason: FinishReason
    message: str = ""


@dataclass(frozen=True)
class ReservedEvent:
    """Blocks are set aside for a prompt's KV."""

    request_id: RequestId
    num_cached_tokens: int  # whole blocks that this pool holds already and has pinned
    block_ids: tuple[tuple[BlockId, ...], ...]  # per layer group, from num_cached_tokens on


@dataclass(frozen=True)
class NoCapacityEvent:
    request_id: RequestId
    message: str


@dataclass(frozen=True)
class PrefilledEvent:
    """A prefill-only request has its first token; its blocks stay pinned until `release`."""

    request_id: RequestId
    token: SampledToken
    num_cached_tokens: int
    queue_s: float
    prefill_s: float
    finished: FinishReason | None = None
    chunks: tuple[tuple[int, float, float], ...] = ()
    """Of the first ones: tokens, and when its step began and ended, since the first began."""


@dataclass(frozen=True)
class BlocksStoredEvent:
    """Full blocks became shareable: a chain, parents first. `parent` is None at a prompt's
    start."""

    parent: BlockHash | None
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True)
class BlocksRemovedEvent:
    hashes: tuple[BlockHash, ...]


EngineEvent = (
    TokenEvent
    | FinishedEvent
    | ReservedEvent
    | NoCapacityEvent
    | PrefilledEvent
    | BlocksStoredEvent
    | BlocksRemovedEvent
)


@dataclass(frozen=True)
class EngineLoad:
    """What an engine has to do, and what it has learned of its speed."""

    num_waiting: int
    num_running: int
    num_reserved: int
    num_free_blocks: int
    num_blocks: int
    num_quarantined_blocks: int
    """Blocks that stay unusable until another worker has provably stopped. A late writer could
    still change them, or a late reader read them. Counted for the layer group that lacks most."""
    num_quarantined_bytes: int = 0
    """Their bytes over all layer groups, layers and ranks."""
    num_exporting: int = 0
    num_queued_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    """Computed a second time after preemptions."""
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0


# --- what a step asks of every rank -------------------------------------------------------------


class Scored(NamedTuple):
    """Tokens of a prompt, each to be given its log-probability with the likeliest instead."""

    token_ids: TokenIds
    num_top: int


@dataclass(frozen=True)
class ScheduledSeq:
    """One request's part of a step.

    The arrays are views of the scheduler's and valid during the step. Any entry of a block table
    may differ in the next step: a window leaves a block, or a cached twin replaces it.
    """

    request_id: RequestId
    token_ids: TokenIds  # [num_tokens], those whose KV is computed now
    start: int  # position of the first one: tokens before it are in the KV cache
    block_tables: tuple[np.ndarray, ...]  # per layer group, int32 [num_blocks]
    samples: bool  # the step reaches the end of what is known: a token is sampled
    scored: Scored | None = None


Scores = dict[RequestId, list[TokenLogprobs]]
"""Log-probabilities of what a step's sequences name as `scored`."""


@dataclass(frozen=True)
class StepPlan:
    """Everything a rank needs for a step. Rank 0 makes it and broadcasts it."""

    step: int
    seqs: tuple[ScheduledSeq, ...]
    pushes: tuple[BlockPush, ...] = ()
    sink_messages: tuple[bytes, ...] = ()
    """Opaque to the engine: delivered on every rank to its KvSink before the step."""
    num_tokens: int = field(default=0)
