"""Draw tokens on a GPU in one launch, whatever their filters, so that the host never waits.

A row's program finds the least likely token that top-k and top-p keep by bisection between its
logits, without sorting them. It then draws the noise of `sampling_noise` and keeps the highest
score among the kept tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 8192
_LOG2E = tl.constexpr(1.4426950408889634)
_GREATEST = tl.constexpr(3.4028234663852886e38)  # of float32


def draw(
    logits: torch.Tensor,
    rows: torch.Tensor,
    keys: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    log_min_p: torch.Tensor,
) -> torch.Tensor:
    """One token for each of these rows of float32 logits [num_rows, vocab_size]: int64 [n].

    The others as `Draws` has them, n rows each.
    """
    assert logits.is_contiguous()
    vocab_size = logits.shape[1]
    drawn = torch.empty_like(rows)
    block = min(_BLOCK, triton.next_power_of_2(vocab_size))
    _draw[(len(rows),)](
        logits, rows, keys, temperature, top_k, top_p, log_min_p, drawn,
        VOCAB_SIZE=vocab_size, BLOCK=block, num_warps=max(1, block // 256),
    )  # fmt: skip
    return drawn


@triton.jit
def _around(
    row, threshold, highest, sharpness,
    VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr, WITH_MASS: tl.constexpr,
):  # fmt: skip
    """Split logits at a threshold. Of those above: how many, the sum of their weights 2 ** ((logit
    - highest) * sharpness), and the least. Of the others: the greatest."""
    counts = tl.zeros((BLOCK,), tl.int32)
    sums = tl.zeros((BLOCK,), tl.float32)
    leasts = tl.full((BLOCK,), float("inf"), tl.float32)
    greatests = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, VOCAB_SIZE, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logit = tl.load(row + token, mask=token < VOCAB_SIZE, other=float("-inf"))
        above = logit > threshold
        counts += above.to(tl.int32)
        if WITH_MASS:
            sums += tl.where(above, tl.exp2((logit - highest) * sharpness), 0.0)
        leasts = tl.minimum(leasts, tl.where(above, logit, float("inf")))
        greatests = tl.maximum(greatests, tl.where(above, float("-inf"), logit))
    count = tl.sum(counts, 0).to(tl.float64)
    mass = tl.sum(sums.to(tl.float64), 0)
    return count, mass, tl.min(leasts, 0), tl.max(greatests, 0)


@triton.jit
def _least_kept(
    row, dropped, limit, highest, sharpness,
    VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr, BY_MASS: tl.constexpr,
):  # fmt: skip
    """The least logit above which there is less than `limit`: of logits, or of their weights.
    `dropped`: below all that may stay."""
    least = highest
    between = least > dropped  # whether logits between the two are still to be judged
    while between:
        middle = dropped + (least - dropped) * 0.5
        middle = tl.where(middle < least, middle, dropped)
        count, mass, up, down = _around(row, middle, highest, sharpness, VOCAB_SIZE, BLOCK, BY_MASS)
        keeps = (mass < limit) if BY_MASS else (count < limit)
        between = tl.where(keeps, down > dropped, up < least)
        least = tl.where(keeps, tl.where(down > dropped, down, up), least)
        dropped = tl.where(keeps, dropped, middle)
    return least


@triton.jit
def _draw(
    logits, rows, keys, temperatures, top_ks, top_ps, log_min_ps, drawn,
    VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    row = logits + tl.load(rows + n) * VOCAB_SIZE
    temperature = tl.load(temperatures + n)
    top_k = tl.load(top_ks + n).to(tl.float64)
    top_p = tl.load(top_ps + n)
    sharpness = _LOG2E / temperature

    highests = tl.full((BLOCK,), float("-inf"), tl.float32)
    lowests = tl.full((BLOCK,), float("inf"), tl.float32)
    allowed = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, VOCAB_SIZE, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logit = tl.load(row + token, mask=token < VOCAB_SIZE, other=float("-inf"))
        highests = tl.maximum(highests, logit)
        # A forbidden token is -inf, and never drawn.
        allowed += (logit > float("-inf")).to(tl.int32)
        lowests = tl.minimum(lowests, tl.where(logit == float("-inf"), float("inf"), logit))
    # Finite, or the search below would not end.
    highest, lowest = tl.minimum(tl.max(highests, 0), _GREATEST), tl.min(lowests, 0)
    top_k = tl.minimum(top_k, tl.sum(allowed, 0).to(tl.float64))

    dropped = lowest - tl.abs(lowest) - 1.0
    least = dropped
    if top_k < VOCAB_SIZE:
        least = _least_kept(row, dropped, top_k, highest, sharpness, VOCAB_SIZE, BLOCK, False)
    if top_p < 1.0:
        count, total, _, _ = _around(row, least, highest, sharpness, VOCAB_SIZE, BLOCK, True)
        if top_k < VOCAB_SIZE:
            # Of those as likely as the top_k-th only some are among the top k.
            weight = tl.exp2((least - highest) * sharpness)
            total += (top_k - count) * weight.to(tl.float64)
        by_mass = _least_kept(
            row, dropped, top_p * total, highest, sharpness, VOCAB_SIZE, BLOCK, True
        )
        least = tl.maximum(least, by_mass)
    least_scaled = tl.div_rn(highest, temperature) + tl.load(log_min_ps + n)

    first, second = tl.load(keys + 2 * n), tl.load(keys + 2 * n + 1)
    bests = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_tokens = tl.full((BLOCK,), VOCAB_SIZE, tl.int32)
    for start in range(0, VOCAB_SIZE, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logit = tl.load(row + token, mask=token < VOCAB_SIZE, other=float("-inf"))
        scaled = tl.div_rn(logit, temperature)
        h = token * -1640531527
        h = (h ^ first) * -862048943
        h ^= (h >> 16) & 0xFFFF
        h = h * -2048144789 + second
        h ^= (h >> 13) & 0x7FFFF
        h = h * -1028477387
        h ^= (h >> 16) & 0xFFFF
        h &= 0x7FFFFFFF
        uniform = tl.minimum((h.to(tl.float32) + 0.5) * 4.656612873077393e-10, 1 - 2.0**-24)
        # log1p(-u), exact also where 1 - u is rounded.
        rest = 1.0 - uniform
        log1p = tl.where(rest == 1.0, -uniform, tl.log(rest) * (-uniform / (rest - 1.0)))
        score = scaled - tl.log(-log1p)
        better = (logit >= least) & (scaled >= least_scaled) & (score > bests)
        bests = tl.where(better, score, bests)
        best_tokens = tl.where(better, token, best_tokens)
    # Of equal scores the lowest id.
    token = tl.min(tl.where(bests == tl.max(bests, 0), best_tokens, VOCAB_SIZE), 0)
    token = tl.minimum(token, VOCAB_SIZE - 1)  # where no logit is a number
    tl.store(drawn + n, token.to(tl.int64))
