"""Products of activations with 8-bit weights, in Triton: x @ (values * scales).T.

Weights are read as they are stored and become the activations' type in registers. A group's sums
take its scales before they are added up in float32, so a scale is never rounded to 16 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK_K = 64
_FEW_ROWS = 16  # the fewest that a product of tiles takes


@triton.jit
def _multiply(
    x, values, scales, bias, out, rows, outputs, inputs,
    GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows times BLOCK_N outputs. BLOCK_K divides GROUP where there are several groups."""
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_row, is_column = row < rows, column < outputs
    from_x = x + row.to(tl.int64)[:, None] * inputs + k[None, :]
    from_values = values + column.to(tl.int64)[None, :] * inputs + k[:, None]
    from_scales = scales + column.to(tl.int64) * NUM_GROUPS
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, inputs, BLOCK_K):
        inside = k < inputs - start
        left = tl.load(from_x + start, mask=is_row[:, None] & inside[None, :], other=0.0)
        right = tl.load(from_values + start, mask=inside[:, None] & is_column[None, :], other=0)
        right = right.to(left.dtype)
        if NUM_GROUPS == 1:
            sums = tl.dot(left, right, sums, input_precision="ieee")
        else:
            scale = tl.load(from_scales + start // GROUP, mask=is_column, other=0.0)
            sums += tl.dot(left, right, input_precision="ieee") * scale[None, :]
    if NUM_GROUPS == 1:
        sums *= tl.load(from_scales, mask=is_column, other=0.0)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    at = out + row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def multiply(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """x [n, in], values int8 [out, in], scales float32 [out, groups] -> [n, out] of x's dtype or
    `out_dtype`."""
    x = x.contiguous()
    (rows, inputs), (outputs, num_groups) = x.shape, scales.shape
    out = x.new_empty(rows, outputs, dtype=out_dtype)
    if rows == 0:
        return out
    group = inputs // num_groups
    # The largest power of two that divides a group; a product of tiles takes 16 at least.
    block_k = _BLOCK_K if num_groups == 1 else min(_BLOCK_K, group & -group)
    if block_k < _FEW_ROWS:
        weight = (values.unflatten(1, (num_groups, group)) * scales[:, :, None]).flatten(1)
        return torch.nn.functional.linear(x, weight.to(x.dtype), bias).to(out.dtype)
    block_m, block_n = (_FEW_ROWS, 32) if rows <= _FEW_ROWS else (64, 64)
    grid = (triton.cdiv(outputs, block_n), triton.cdiv(rows, block_m))
    _multiply[grid](
        x, values, scales, x if bias is None else bias, out, rows, outputs, inputs,
        GROUP=group, NUM_GROUPS=num_groups, HAS_BIAS=bias is not None,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4,
    )  # fmt: skip
    return out
