"""What a step's rows say about sampling, moved to the device of their logits at once.

On a GPU the host waits for the work under way whenever a list is copied by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels.step_batch import to_device_together
from engine.request import RequestSpec, SamplingParams
from engine.sampling.noise import position_keys

Array = npt.NDArray[Any]

_GREEDY_BELOW = 1e-5  # a temperature that leaves nothing to chance in float32
_FEW_TOKENS = 256  # a top k up to this is looked at alone, without the rest of its row


@dataclass(frozen=True)
class Row:
    """One sequence that samples."""

    spec: RequestSpec
    index: int  # of the output token to sample

    @property
    def params(self) -> SamplingParams:
        return self.spec.sampling

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < _GREEDY_BELOW or self.params.top_k == 1

    @property
    def takes_likeliest(self) -> bool:
        """Whether the row takes the likeliest token of its logits, apart from forbidden ones."""
        params = self.params
        changed = params.has_penalties or params.logit_bias or params.allowed_tokens
        return self.is_greedy and not changed


@dataclass(frozen=True)
class Draws:
    """Rows whose token is drawn, in host memory and, columns [n, 1], on the device."""

    params: Sequence[SamplingParams]
    rows: Sequence[int]
    where: torch.Tensor
    """int64 [n]: the same as `rows`."""
    keys: torch.Tensor
    """Keys of the rows' noise: int32 [n, 2]."""
    temperature: torch.Tensor
    top_k: torch.Tensor
    """int64, at most the vocabulary."""
    top_p: torch.Tensor
    """float64."""
    log_min_p: torch.Tensor
    """float32; -inf where there is no minimum."""

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, start: int, stop: int) -> Draws:
        some = slice(start, stop)
        columns = self.where, self.keys, self.temperature, self.top_k, self.top_p, self.log_min_p
        return Draws(self.params[some], self.rows[some], *(column[some] for column in columns))


@dataclass(frozen=True)
class Penalties:
    """Rows with penalties: columns [n, 1], and all their tokens, row after row."""

    where: torch.Tensor
    """int64 [n]: their rows among the logits."""
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    token_rows: torch.Tensor
    """int64 [num_tokens]: the row of each token, among these n."""
    token_ids: torch.Tensor
    """int64 [num_tokens]."""
    is_output: torch.Tensor
    """float32 [num_tokens]: 1 for generated tokens, 0 for those of the prompt."""


@dataclass(frozen=True)
class Biases:
    """What is added to logits, by row and token: [n] each."""

    rows: torch.Tensor
    token_ids: torch.Tensor
    values: torch.Tensor
    """float32; -inf forbids the token. Of two for the same token the sum counts."""


@dataclass(frozen=True)
class SamplingRows:
    """All rows of a step for which the likeliest token of the logits is not enough."""

    draws: Draws
    """First `num_few` rows with so small a top k that only those tokens are examined. Of the others
    those with a top-k or top-p limit come first."""
    num_few: int
    penalties: Penalties
    biases: Biases
    limited: torch.Tensor
    """int64 [n]: rows that may sample some tokens only."""
    allowed: torch.Tensor
    """uint8 [n, vocab_size / 8, rounded up]: which, as in `Masks`."""

    @property
    def few(self) -> Draws:
        return self.draws.part(0, self.num_few)

    @property
    def many(self) -> Draws:
        return self.draws.part(self.num_few, len(self.draws))

    @classmethod
    def of(
        cls,
        rows: Sequence[Row],
        forbidden: Sequence[frozenset[int]],
        vocab_size: int,
        device: torch.device,
    ) -> SamplingRows:
        """Collect the rows. `forbidden` has tokens by row."""
        drawn = [i for i, row in enumerate(rows) if not row.is_greedy]
        most = min(_FEW_TOKENS, vocab_size)
        few = [i for i in drawn if 0 < rows[i].params.top_k <= most]
        many = sorted(set(drawn) - set(few), key=lambda i: not is_limited(rows[i].params))
        parts = (
            _draw_columns(rows, few + many, vocab_size),
            _penalty_columns(rows),
            _bias_columns(rows, forbidden, vocab_size),
            _allowed_rows(rows, vocab_size),
        )
        moved = iter(to_device_together([column for part in parts for column in part], device))
        draws, penalties, biases, allowed = (islice(moved, len(part)) for part in parts)
        return cls(
            Draws([rows[i].params for i in few + many], few + many, *draws),
            len(few),
            Penalties(*penalties),
            Biases(*biases),
            *allowed,
        )


def draws_of(
    rows: Sequence[Row], where: Sequence[int], vocab_size: int, device: torch.device
) -> Draws:
    """Make `Draws` of some rows, as in `SamplingRows.many`."""
    where = sorted(where, key=lambda i: not is_limited(rows[i].params))
    moved = to_device_together(_draw_columns(rows, where, vocab_size), device)
    return Draws([rows[i].params for i in where], where, *moved)


def is_limited(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1


def _draw_columns(rows: Sequence[Row], where: Sequence[int], vocab_size: int) -> list[Array]:
    params = [rows[i].params for i in where]
    top_k = [min(p.top_k or vocab_size, vocab_size) for p in params]
    with np.errstate(divide="ignore"):
        log_min_p = np.log(np.array([p.min_p for p in params], np.float64))
    return [
        np.array(where, np.int64),
        position_keys([(rows[i].params.seed, rows[i].index) for i in where]),
        _column([p.temperature for p in params]),
        _column(top_k, np.int64),
        _column([p.top_p for p in params], np.float64),
        _column(log_min_p),
    ]


def _penalty_columns(rows: Sequence[Row]) -> list[Array]:
    where = [i for i, row in enumerate(rows) if row.params.has_penalties]
    params = [rows[i].params for i in where]
    specs = [rows[i].spec for i in where]
    counts = [len(spec.token_ids) for spec in specs]
    ids: list[Array] = [np.zeros(0, np.int64), *(spec.token_ids for spec in specs)]
    is_output: list[Array] = [np.zeros(0, bool)]
    is_output += [np.arange(len(s.token_ids)) >= s.num_prompt_tokens for s in specs]
    return [
        np.array(where, np.int64),
        _column([p.repetition_penalty for p in params]),
        _column([p.frequency_penalty for p in params]),
        _column([p.presence_penalty for p in params]),
        np.repeat(np.arange(len(where)), counts),
        np.concatenate(ids).astype(np.int64),
        np.concatenate(is_output).astype(np.float32),
    ]


def _bias_columns(
    rows: Sequence[Row], forbidden: Sequence[frozenset[int]], vocab_size: int
) -> list[Array]:
    """Keep at least one token of each row allowed."""
    found = [(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32))]
    for index, (row, ids) in enumerate(zip(rows, forbidden)):
        if ids:
            allowed = int.from_bytes(row.params.allowed_tokens, "little") or (1 << vocab_size) - 1
            inside = np.array([token for token in ids if allowed >> token & 1], np.int64)
            if len(inside) < allowed.bit_count():
                values = np.full(len(inside), -np.inf, np.float32)
                found.append((np.full(len(inside), index), inside, values))
        if row.params.logit_bias:
            tokens, values = row.params.biases
            found.append((np.full(len(tokens), index), tokens, values))
    return [np.concatenate(column) for column in zip(*found)]


def _allowed_rows(rows: Sequence[Row], vocab_size: int) -> list[Array]:
    where = [i for i, row in enumerate(rows) if row.params.allowed_tokens]
    bits = np.zeros((len(where), -(-vocab_size // 8)), np.uint8)
    for made, i in zip(bits, where):
        packed = np.frombuffer(rows[i].params.allowed_tokens, np.uint8)
        made[: len(packed)] = packed
    return [np.array(where, np.int64), bits]


def _column(values: Sequence[float] | Array, dtype: npt.DTypeLike = np.float32) -> Array:
    return np.array(values, dtype)[:, None]
