"""Choose the next token of each sequence from its logits.

For one row: a constraint's mask, the request's allowed and forbidden tokens, its biases, then
penalties change the logits, as in vLLM; temperature scales them; top-k, then top-p, and min-p drop
unlikely tokens; noise decides (`sampling_noise`).
Rows never influence each other, so a request gets the same token alone and in any batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from engine.api import ComputeMasks
from engine.kernels.step_batch import to_device, to_device_together
from engine.kernels.triton import triton_available
from engine.request import RequestId, RequestSpec, SampledToken, ScheduledSeq, TokenLogprobs
from engine.sampling.noise import gumbel_noise, noise_of_tokens
from engine.sampling.rows import Draws, Penalties, Row, SamplingRows, draws_of, is_limited
from kv_transfer.block_hash import TokenIds

_CHUNK_ELEMENTS = 1 << 17  # logits whose noise a CPU draws at once: what stays in a core's cache


class Sampler:
    """Chooses tokens. It is stateless except for the model's end-of-sequence ids."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids

    def sample(
        self,
        logits: torch.Tensor,
        seqs: Sequence[ScheduledSeq],
        specs: dict[RequestId, RequestSpec],
        masks: ComputeMasks | None = None,
    ) -> list[SampledToken]:
        """Sample `logits` [n, vocab_size] of the n sequences that sample, in order, on any device.
        `specs` has each of them, complete where there are penalties or bad words. Rows of `masks`
        are changed in place, so their log-probabilities are those of allowed tokens."""
        if masks is None:
            return self._sample(logits, seqs, specs)
        computed = masks()
        arrays, on_cpu = (np.array(computed.rows, np.int64), computed.bits), logits.is_cpu
        moved = (
            map(torch.from_numpy, arrays) if on_cpu else to_device_together(arrays, logits.device)
        )
        _mask(logits, *moved)
        answer = self._sample(logits, seqs, specs)
        for row, fault in computed.faults.items():
            answer[row] = replace(answer[row], fault=fault)
        return answer

    def _sample(
        self,
        logits: torch.Tensor,
        seqs: Sequence[ScheduledSeq],
        specs: dict[RequestId, RequestSpec],
    ) -> list[SampledToken]:
        rows = [_row(seq, specs[seq.request_id]) for seq in seqs]
        forbidden = [row.spec.forbidden(row.index, self._eos_token_ids) for row in rows]
        if any(forbidden) or not all(row.takes_likeliest for row in rows):
            wanted = SamplingRows.of(rows, forbidden, logits.shape[1], logits.device)
            adjusted = _penalise(_limit(logits.float(), wanted), wanted.penalties)
            chosen, ties = _choose(adjusted, wanted)
        else:
            adjusted, chosen, ties = logits, _likeliest(logits), []
        answer, tied = _read_back(logits, rows, chosen, ties)
        if not any(tied):
            return answer
        again = [i for i, tie in zip(wanted.few.rows, tied, strict=True) if tie]
        draws = draws_of(rows, again, logits.shape[1], logits.device)
        for some in _parts(draws, logits):
            chosen[some.where] = _draw(_scaled(adjusted, some), some)
        return _read_back(logits, rows, chosen, [])[0]


def _row(seq: ScheduledSeq, spec: RequestSpec) -> Row:
    return Row(spec, seq.start + len(seq.token_ids) - spec.num_prompt_tokens)


# --- changed logits -----------------------------------------------------------------------------


@torch.inference_mode()  # as the logits were made
def _mask(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """Set the probability of what these rows do not allow to 0, in place. `bits` as in `Masks`."""
    if logits.device.type == "cpu":  # row by row, in a core's cache
        for row, packed in zip(rows.numpy(), bits.numpy()):
            denied = np.unpackbits(~packed, count=logits.shape[1], bitorder="little").view(bool)
            logits[row].masked_fill_(torch.from_numpy(denied), -torch.inf)
        return
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = (bits[:, :, None] >> shifts & 1).flatten(1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill_(allowed == 0, -torch.inf)


def _limit(logits: torch.Tensor, wanted: SamplingRows) -> torch.Tensor:
    """Set the probability of what a request does not allow to 0, and add its biases."""
    biases = wanted.biases
    if not (len(wanted.limited) or len(biases.rows)):
        return logits
    logits = logits.clone()
    if len(wanted.limited):
        _mask(logits, wanted.limited, wanted.allowed)
    return logits.index_put_((biases.rows, biases.token_ids), biases.values, accumulate=True)


def _penalise(logits: torch.Tensor, penalties: Penalties) -> torch.Tensor:
    where = penalties.where
    if not len(where):
        return logits
    seen = _counts(penalties, torch.ones_like(penalties.is_output), logits.shape[1])
    generated = _counts(penalties, penalties.is_output, logits.shape[1])
    part, repetition = logits[where], penalties.repetition
    part = torch.where(seen > 0, torch.where(part > 0, part / repetition, part * repetition), part)
    part -= penalties.frequency * generated
    part -= penalties.presence * (generated > 0)
    return logits.index_copy(0, where, part)


def _counts(penalties: Penalties, weights: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Sum each id's weights: float32 [n, vocab_size]."""
    counts = torch.zeros(len(penalties.where), vocab_size, device=weights.device)
    where = penalties.token_rows, penalties.token_ids
    return counts.index_put_(where, weights, accumulate=True)


# --- choice -------------------------------------------------------------------------------------


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Find the first of each row's largest logits: int64 [n]."""
    if logits.device.type == "cpu":  # torch's own takes ten times as long there
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(dim=-1)


def _choose(
    logits: torch.Tensor, wanted: SamplingRows
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """Choose a token per row: int64 [n]. The host does not wait for a GPU with Triton.

    Also reports which of `wanted.few` are to be drawn among more tokens, bool, in parts.
    """
    chosen = _likeliest(logits)
    if not len(wanted.draws):
        return chosen, []
    if triton_available.runs_on(logits.device.type):
        chosen[wanted.draws.where] = _draw_at_once(logits, wanted.draws)
        return chosen, []
    few = [_draw_few(_scaled(logits, some), some) for some in _parts(wanted.few, logits)]
    many = [_draw(_scaled(logits, some), some) for some in _parts(wanted.many, logits)]
    chosen[wanted.draws.where] = torch.cat([*(token_ids for token_ids, _ in few), *many])
    return chosen, [tied for _, tied in few]


def _draw_at_once(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    from engine.sampling.kernel import draw

    filters = draws.temperature, draws.top_k, draws.top_p, draws.log_min_p
    return draw(logits.contiguous(), draws.where, draws.keys, *filters)


def _parts(draws: Draws, logits: torch.Tensor) -> Iterator[Draws]:
    """Cut the rows into parts. On a device all of them are one: for each part the host would
    wait."""
    on_cpu = logits.device.type == "cpu"
    length = max(1, _CHUNK_ELEMENTS // logits.shape[1] if on_cpu else len(draws))
    return (draws.part(start, start + length) for start in range(0, len(draws), length))


def _scaled(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    return logits[draws.where] / draws.temperature


def _draw_few(logits: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw among the top k of each row: ids [n].

    Reports rows where others are as likely as the k-th: those tokens stay or go together, so such a
    row has more than k tokens to draw from.
    """
    likeliest, token_ids = logits.topk(max(p.top_k for p in draws.params), dim=-1)
    in_top_k = torch.arange(likeliest.shape[1], device=logits.device) < draws.top_k
    least_likely = likeliest.gather(-1, draws.top_k - 1)
    tied = (logits >= least_likely).sum(-1) > draws.top_k[:, 0]
    tied &= least_likely[:, 0] > -torch.inf  # else fewer than k are allowed
    total = likeliest.masked_fill(~in_top_k, -torch.inf).logsumexp(-1, keepdim=True)
    probabilities = (likeliest - total).double().exp()
    before = probabilities.cumsum(-1) - probabilities
    in_top_p = (before < draws.top_p) | (draws.top_p >= 1)
    num_kept = (in_top_k & in_top_p).sum(-1, keepdim=True)
    least = likeliest.gather(-1, num_kept.clamp_(min=1) - 1)
    least = torch.maximum(least, likeliest[:, :1] + draws.log_min_p)
    scores = noise_of_tokens(draws.keys, token_ids) + likeliest
    scores.masked_fill_(~in_top_k | (likeliest < least), -torch.inf)
    # Of equal scores the lowest id, as where all tokens are looked at in their order.
    best = token_ids.masked_fill(scores < scores.amax(-1, keepdim=True), logits.shape[1]).amin(-1)
    return best, tied


def _draw(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Draw among all tokens. If a filter drops the drawn token, draw among the likelier ones.

    The largest of all scores is the largest of the kept ones, if it is kept. If it is not, nothing
    less likely is kept either. So no row has to be sorted.
    """
    scores = gumbel_noise(draws.keys, logits.shape[1]).add_(logits)
    if any(params.min_p for params in draws.params):
        scores.masked_fill_(logits < logits.amax(-1, keepdim=True) + draws.log_min_p, -torch.inf)
    sampled = _likeliest(scores)
    num_limited = sum(map(is_limited, draws.params))  # they come first
    where = torch.arange(num_limited, device=logits.device)
    part = logits[:num_limited]
    limits = _limits(part, draws.part(0, num_limited))
    while len(where):
        drawn = part.gather(-1, sampled[where, None])
        left = torch.nonzero(~_are_kept(part, drawn, limits))[:, 0]
        if not len(left):
            break
        where, part = where[left], part[left]
        scores[where] = scores[where].masked_fill_(part <= drawn[left], -torch.inf)
        sampled[where] = _likeliest(scores[where])
        limits = _Limits(*(column[left] for column in limits))
    return sampled


class _Limits(NamedTuple):
    """The limits that top-k and top-p set for n rows: [n, 1] each."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    total: torch.Tensor  # log of the sum of the exponentials of the top k


def _limits(logits: torch.Tensor, draws: Draws) -> _Limits:
    total = logits.logsumexp(-1, keepdim=True)
    for i, params in enumerate(draws.params):
        if 0 < params.top_k < logits.shape[1] and params.top_p < 1:
            total[i] = logits[i].topk(params.top_k).values.logsumexp(-1)
    return _Limits(draws.top_k, draws.top_p, total)


def _are_kept(logits: torch.Tensor, drawn: torch.Tensor, limits: _Limits) -> torch.Tensor:
    """Whether top-k and top-p keep tokens of logits `drawn` [n, 1]: [n]. The likeliest stay."""
    above = logits > drawn
    num_above = above.sum(-1)
    rows, columns = above.nonzero(as_tuple=True)
    probabilities = (logits[rows, columns] - limits.total[rows, 0]).double().exp_()
    mass = torch.zeros_like(limits.top_p[:, 0]).index_add_(0, rows, probabilities)
    in_top_p = (mass < limits.top_p[:, 0]) | (limits.top_p[:, 0] >= 1)
    return ((num_above < limits.top_k[:, 0]) & in_top_p) | (num_above == 0)


# --- the answer ---------------------------------------------------------------------------------


def _read_back(
    logits: torch.Tensor, rows: list[Row], chosen: torch.Tensor, ties: Sequence[torch.Tensor]
) -> tuple[list[SampledToken], list[float]]:
    """Return the chosen tokens, with log-probabilities where rows ask for them, from the logits as
    the model gave them, but for a constraint's mask; and `ties`. All is read at once: float64 holds
    ids, ranks and logprobs alike.
    """
    asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not asked:
        found = torch.cat([chosen, *ties]).tolist()
        return [SampledToken(token) for token in found[: len(rows)]], found[len(rows) :]
    where = to_device(np.array(asked, np.int64), logits.device)
    most = max(rows[i].params.logprobs or 0 for i in asked)
    known = _columns(logits[where], chosen[where], most)
    values = torch.cat([chosen.double(), *ties, known.flatten()]).tolist()
    width = 2 + 2 * most
    start = len(values) - width * len(asked)
    of_row = {
        row: _token_logprobs(values[at : at + width], rows[row].params.logprobs or 0)
        for row, at in zip(asked, range(start, len(values), width))
    }
    answer = [SampledToken(int(values[i]), of_row.get(i)) for i in range(len(rows))]
    return answer, values[len(rows) : start]


def _columns(logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> torch.Tensor:
    """Make a row for each of n chosen tokens, as `_token_logprobs` reads it: float64."""
    logprobs = logits.float().log_softmax(-1)
    of_chosen = logprobs.gather(-1, chosen[:, None])
    ranks = (logprobs > of_chosen).sum(-1, keepdim=True).add(1)
    top = logprobs.topk(num_top, dim=-1)
    return torch.cat([p.double() for p in (of_chosen, ranks, top.values, top.indices)], 1)


def logprobs_of(logits: torch.Tensor, token_ids: TokenIds, num_top: int) -> Iterator[TokenLogprobs]:
    """Return the logprobs of given tokens, one for each row of `logits`, with the `num_top`
    likeliest."""
    chosen = to_device(token_ids.astype(np.int64), logits.device)
    return (_token_logprobs(row, num_top) for row in _columns(logits, chosen, num_top).tolist())


def _token_logprobs(row: list[float], num_top: int) -> TokenLogprobs:
    """Make a token's logprobs from its logprob and rank, then the values and ids of the
    likeliest."""
    logprob, rank, *top = row
    values, ids = top[: len(top) // 2], top[len(top) // 2 :]
    likeliest = tuple((int(token), value) for token, value in zip(ids, values))
    return TokenLogprobs(logprob, int(rank), likeliest[:num_top])
