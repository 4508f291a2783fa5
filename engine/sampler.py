"""Choose the next token of each sequence from its logits.

Order, for one row: penalties and forbidden stop ids change the logits; temperature scales them;
top-k, top-p among what is left, and min-p drop the unlikely; noise decides (`sampling_noise`).
Rows never influence each other: a request gets the same token alone and in any batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
from engine.sampling_noise import gumbel_noise, noise_of_tokens

__all__ = ["Sampler", "check"]

_GREEDY_BELOW = 1e-5  # a temperature that leaves nothing to chance in float32
_FEW_TOKENS = 256  # a top k up to this is looked at alone, without the rest of its row
_CHUNK_ELEMENTS = 1 << 17  # logits whose noise is drawn at once: what stays in a core's cache


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


def _column(
    values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)[:, None]


# --- choice -------------------------------------------------------------------------------------


def _choose(logits: torch.Tensor, rows: list[_Row]) -> list[int]:
    chosen: list[int] = logits.argmax(dim=-1).tolist()
    where = [i for i, row in enumerate(rows) if not _is_greedy(row.params)]
    vocab_size = logits.shape[1]
    step = max(1, _CHUNK_ELEMENTS // vocab_size)
    few = [i for i in where if 0 < rows[i].params.top_k <= min(_FEW_TOKENS, vocab_size)]
    many = sorted(set(where) - set(few))
    for some in _parts(few, step):
        drawn = _draw_few(_scaled(logits, rows, some), [rows[i] for i in some])
        many += [i for i, token in zip(some, drawn) if token is None]
        for i, token in zip(some, drawn):
            chosen[i] = chosen[i] if token is None else token
    for some in _parts(many, step):
        for i, token in zip(some, _draw(_scaled(logits, rows, some), [rows[i] for i in some])):
            chosen[i] = token
    return chosen


def _parts(where: list[int], length: int) -> Iterator[list[int]]:
    return (where[start : start + length] for start in range(0, len(where), length))


def _scaled(logits: torch.Tensor, rows: list[_Row], where: list[int]) -> torch.Tensor:
    return logits[where] / _column([rows[i].params.temperature for i in where], logits.device)


def _positions(rows: list[_Row]) -> list[tuple[int, int]]:
    return [(row.params.seed, row.index) for row in rows]


def _draw_few(logits: torch.Tensor, rows: list[_Row]) -> list[int | None]:
    """Draw among each row's top k alone; None where others are as likely as the k-th.

    They would stay or go together: such a row has more than k tokens to draw from.
    """
    params = [row.params for row in rows]
    top_k = _column([p.top_k for p in params], logits.device, torch.int64)
    top_p = _column([p.top_p for p in params], logits.device, torch.float64)
    likeliest, token_ids = logits.topk(max(p.top_k for p in params), dim=-1)
    in_top_k = torch.arange(likeliest.shape[1], device=logits.device) < top_k
    tied = (logits >= likeliest.gather(-1, top_k - 1)).sum(-1) > top_k[:, 0]
    total = likeliest.masked_fill(~in_top_k, -torch.inf).logsumexp(-1, keepdim=True)
    probabilities = (likeliest - total).double().exp()
    before = probabilities.cumsum(-1) - probabilities
    num_kept = (in_top_k & ((before < top_p) | (top_p >= 1))).sum(-1, keepdim=True)
    least = likeliest.gather(-1, num_kept.clamp_(min=1) - 1)
    least = torch.maximum(least, likeliest[:, :1] + _log_min_p(params, logits.device))
    scores = noise_of_tokens(_positions(rows), token_ids) + likeliest
    scores.masked_fill_(~in_top_k | (likeliest < least), -torch.inf)
    # Of equal scores the lowest id, as where all tokens are looked at in their order.
    best = token_ids.masked_fill(scores < scores.amax(-1, keepdim=True), logits.shape[1]).amin(-1)
    return [None if tie else token for token, tie in zip(best.tolist(), tied.tolist())]


def _draw(logits: torch.Tensor, rows: list[_Row]) -> list[int]:
    """Draw among all tokens; where a filter drops the drawn one, draw among the likelier ones.

    The largest of all scores is the largest of those kept, if it is kept. If it is not, nothing
    less likely is kept either. So no row has to be sorted.
    """
    scores = gumbel_noise(_positions(rows), logits.shape[1], logits.device).add_(logits)
    if any(row.params.min_p for row in rows):
        least = _log_min_p([row.params for row in rows], logits.device)
        scores.masked_fill_(logits < logits.amax(-1, keepdim=True) + least, -torch.inf)
    sampled = scores.argmax(dim=-1)
    open_rows = [i for i, row in enumerate(rows) if row.params.top_k or row.params.top_p < 1]
    if open_rows:
        limits = _limits(logits[open_rows], [rows[i].params for i in open_rows])
    while open_rows:
        where = torch.tensor(open_rows, device=logits.device)
        part = logits if len(open_rows) == len(rows) else logits[where]
        drawn = part.gather(-1, sampled[where, None])
        dropped = ~_are_kept(part, drawn, limits)
        left = torch.nonzero(dropped)[:, 0]
        if not len(left):
            break
        where = where[left]
        scores[where] = scores[where].masked_fill_(part[left] <= drawn[left], -torch.inf)
        sampled[where] = scores[where].argmax(dim=-1)
        open_rows = where.tolist()
        limits = _Limits(*(column[left] for column in limits))
    chosen: list[int] = sampled.tolist()
    return chosen


class _Limits(NamedTuple):
    """What top-k and top-p of n rows keep: [n, 1] each."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    total: torch.Tensor  # log of the sum of the exponentials of the top k


def _limits(logits: torch.Tensor, params: list[SamplingParams]) -> _Limits:
    device, vocab_size = logits.device, logits.shape[1]
    top_k = [min(p.top_k or vocab_size, vocab_size) for p in params]
    total = logits.logsumexp(-1, keepdim=True)
    for i, k in enumerate(top_k):
        if k < vocab_size and params[i].top_p < 1:
            total[i] = logits[i].topk(k).values.logsumexp(-1)
    return _Limits(
        _column(top_k, device, torch.int64),
        _column([p.top_p for p in params], device, torch.float64),
        total,
    )


def _are_kept(logits: torch.Tensor, drawn: torch.Tensor, limits: _Limits) -> torch.Tensor:
    """Whether top-k and top-p keep tokens of logits `drawn` [n, 1]: [n]. The likeliest stay."""
    above = logits > drawn
    num_above = above.sum(-1)
    rows, columns = above.nonzero(as_tuple=True)
    probabilities = (logits[rows, columns] - limits.total[rows, 0]).double().exp_()
    mass = torch.zeros_like(limits.top_p[:, 0]).index_add_(0, rows, probabilities)
    in_top_p = (mass < limits.top_p[:, 0]) | (limits.top_p[:, 0] >= 1)
    return ((num_above < limits.top_k[:, 0]) & in_top_p) | (num_above == 0)


def _log_min_p(params: list[SamplingParams], device: torch.device) -> torch.Tensor:
    """float32 [n, 1]; -inf where there is no minimum."""
    return _column([p.min_p for p in params], device, torch.float64).log_().float()


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
