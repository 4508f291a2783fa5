"""Choose the next token of each sequence from its logits.

Order, for one row: penalties and forbidden stop ids change the logits; temperature scales them;
top-k, top-p among what is left, and min-p drop the unlikely; noise decides (`sampling_noise`).
Rows never influence each other: a request gets the same token alone and in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.request import (
    RequestId,
    RequestSpec,
    SampledToken,
    SamplingParams,
    ScheduledSeq,
    TokenLogprobs,
)
from engine.sampling_check import check
from engine.sampling_noise import gumbel_noise

__all__ = ["Sampler", "check"]

_GREEDY_BELOW = 1e-5  # a temperature that leaves nothing to chance in float32
_FIRST_CANDIDATES = 1024  # likeliest tokens looked at first, when a filter needs them in order
_MORE_CANDIDATES = 16  # times as many, when those were not enough
_CHUNK_ELEMENTS = 1 << 19  # logits whose noise is drawn at once: what stays in a core's cache


@dataclass(frozen=True)
class _Row:
    spec: RequestSpec
    index: int  # of the output token to sample

    @property
    def params(self) -> SamplingParams:
        return self.spec.sampling


class Sampler:
    """Stateless but for the model's end-of-sequence ids."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids

    def sample(
        self,
        logits: torch.Tensor,
        seqs: Sequence[ScheduledSeq],
        specs: dict[RequestId, RequestSpec],
    ) -> list[SampledToken]:
        """Logits [n, vocab_size] of the n sequences that sample, in order, on any device.

        `specs` has each of them; `token_ids` must be complete where there are penalties.
        """
        rows = [_row(seq, specs[seq.request_id]) for seq in seqs]
        forbidden = [self._forbidden(row) for row in rows]
        adjusted = _penalise(_forbid(logits.float(), forbidden), rows)
        token_ids = _choose(adjusted, rows)
        logprobs = _logprobs(logits, rows, token_ids)
        return [SampledToken(token, logprobs.get(i)) for i, token in enumerate(token_ids)]

    def _forbidden(self, row: _Row) -> frozenset[int]:
        params = row.params
        if row.index >= params.min_tokens:
            return frozenset()
        return params.stop_token_ids | (frozenset() if params.ignore_eos else self._eos_token_ids)


def _row(seq: ScheduledSeq, spec: RequestSpec) -> _Row:
    return _Row(spec, seq.start + len(seq.token_ids) - spec.num_prompt_tokens)


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature < _GREEDY_BELOW or params.top_k == 1


# --- changed logits -----------------------------------------------------------------------------


def _forbid(logits: torch.Tensor, forbidden: list[frozenset[int]]) -> torch.Tensor:
    """Give ids a probability of 0; a row's tokens are never all forbidden."""
    if not any(forbidden):
        return logits
    logits = logits.clone()
    vocab_size = logits.shape[1]
    for row, ids in enumerate(forbidden):
        inside = [token for token in ids if token < vocab_size]
        if len(inside) < vocab_size:
            logits[row, inside] = -torch.inf
    return logits


def _penalise(logits: torch.Tensor, rows: list[_Row]) -> torch.Tensor:
    where = [i for i, row in enumerate(rows) if row.params.has_penalties]
    if not where:
        return logits
    picked = [rows[i] for i in where]
    params = [row.params for row in picked]
    device = logits.device
    seen = _counts([row.spec.token_ids for row in picked], logits.shape[1], device)
    generated = _counts(
        [row.spec.token_ids[row.spec.num_prompt_tokens :] for row in picked],
        logits.shape[1],
        device,
    )
    part = logits[where]
    repetition = _column([p.repetition_penalty for p in params], device)
    part = torch.where(seen > 0, torch.where(part > 0, part / repetition, part * repetition), part)
    part -= _column([p.frequency_penalty for p in params], device) * generated
    part -= _column([p.presence_penalty for p in params], device) * (generated > 0)
    logits = logits.clone()
    logits[where] = part
    return logits


def _counts(token_ids: Sequence[np.ndarray], vocab_size: int, device: torch.device) -> torch.Tensor:
    """How often each id occurs: float32 [n, vocab_size]."""
    lengths = torch.tensor([len(ids) for ids in token_ids])
    rows = torch.repeat_interleave(torch.arange(len(token_ids)), lengths).to(device)
    columns = torch.from_numpy(np.concatenate(token_ids).astype(np.int64)).to(device)
    counts = torch.zeros(len(token_ids), vocab_size, device=device)
    return counts.index_put_((rows, columns), torch.ones((), device=device), accumulate=True)


def _column(values: list[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None]


# --- choice -------------------------------------------------------------------------------------


def _choose(logits: torch.Tensor, rows: list[_Row]) -> list[int]:
    chosen: list[int] = logits.argmax(dim=-1).tolist()
    where = [i for i, row in enumerate(rows) if not _is_greedy(row.params)]
    if not where:
        return chosen
    vocab_size = logits.shape[1]
    step = max(1, _CHUNK_ELEMENTS // vocab_size)
    for start in range(0, len(where), step):
        some = where[start : start + step]
        for i, token in zip(some, _draw(logits[some], [rows[i] for i in some])):
            chosen[i] = token
    return chosen


def _draw(logits: torch.Tensor, rows: list[_Row]) -> list[int]:
    scaled = logits / _column([row.params.temperature for row in rows], logits.device)
    kept = _filter(scaled, [row.params for row in rows])
    positions = [(row.params.seed, row.index) for row in rows]
    noise = gumbel_noise(positions, logits.shape[1], logits.device)
    sampled: list[int] = noise.add_(kept).argmax(dim=-1).tolist()
    return sampled


def _filter(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Drop what top-k, top-p and min-p leave out; equally likely tokens stay or go together."""
    where = [i for i, p in enumerate(params) if p.top_k or p.top_p < 1 or p.min_p]
    if not where:
        return logits
    part = logits[where]
    thresholds = _thresholds(part, [params[i] for i in where], _FIRST_CANDIDATES)
    logits = logits.clone()
    logits[where] = part.masked_fill(part < thresholds[:, None], -torch.inf)
    return logits


def _thresholds(
    logits: torch.Tensor, params: list[SamplingParams], num_candidates: int
) -> torch.Tensor:
    """The least logit that each row keeps: [n]."""
    device, vocab_size = logits.device, logits.shape[1]
    num_candidates = min(num_candidates, vocab_size)
    likeliest = logits.topk(num_candidates, dim=-1).values
    top_k = torch.tensor([min(p.top_k or vocab_size, vocab_size) for p in params], device=device)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
    places = torch.arange(num_candidates, device=device)
    in_top_k = places < top_k[:, None]
    # Probabilities among the top k: all of the row where no k is given.
    total = torch.where(
        top_k < vocab_size,
        likeliest.masked_fill(~in_top_k, -torch.inf).logsumexp(-1),
        logits.logsumexp(-1),
    )
    probabilities = (likeliest - total[:, None]).double().exp()
    before = probabilities.cumsum(-1) - probabilities
    num_kept = (in_top_k & ((before < top_p[:, None]) | (top_p[:, None] >= 1))).sum(-1)
    num_kept.clamp_(min=1)
    kept = likeliest.gather(-1, num_kept[:, None] - 1)[:, 0]
    # A row that keeps every candidate may keep more than were looked at.
    open_end = (num_kept == num_candidates) & (top_k > num_candidates)
    unbounded = open_end & (top_p >= 1)
    kept = kept.masked_fill(unbounded, -torch.inf)
    again = torch.nonzero((open_end & ~unbounded) | _cut_k(top_k, num_candidates, vocab_size))[:, 0]
    if len(again) and num_candidates < vocab_size:
        more = num_candidates * _MORE_CANDIDATES
        kept[again] = _thresholds(logits[again], [params[i] for i in again.tolist()], more)
    min_p = torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device)
    return torch.maximum(kept, likeliest[:, 0] + min_p.log().float())


def _cut_k(top_k: torch.Tensor, num_candidates: int, vocab_size: int) -> torch.Tensor:
    """Rows whose k is larger than the candidates, so that their sum is not known from them."""
    return (top_k > num_candidates) & (top_k < vocab_size)


# --- log-probabilities --------------------------------------------------------------------------


def _logprobs(
    logits: torch.Tensor, rows: list[_Row], token_ids: list[int]
) -> dict[int, TokenLogprobs]:
    """By row, for those that ask; of the logits as the model gave them."""
    where = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not where:
        return {}
    logprobs = logits[where].float().log_softmax(-1)
    sampled = torch.tensor([token_ids[i] for i in where], device=logits.device)
    of_sampled = logprobs.gather(-1, sampled[:, None])
    ranks = (logprobs > of_sampled).sum(-1).add(1).tolist()
    most = max(rows[i].params.logprobs or 0 for i in where)
    top = logprobs.topk(most, dim=-1)
    top_values, top_ids = top.values.tolist(), top.indices.tolist()
    return {
        i: TokenLogprobs(
            float(of_sampled[j, 0]),
            int(ranks[j]),
            tuple(zip(top_ids[j], top_values[j]))[: rows[i].params.logprobs],
        )
        for j, i in enumerate(where)
    }
