"""The programs that run on a GPU, in Triton. `triton_kernels` launches them.

Attention is FlashAttention-2's (arXiv:2307.08691): a tile of queries passes over its keys once and
keeps a running maximum and sum. Keys split over pieces are merged by their log-sum-exp, as
flash-decoding does. Keys and values are read where they lie, block by block.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
_TWICE_SQRT_2_BY_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def _over_keys(
    acc, total, highest, q, query_at, lower, upper, end,
    keys, values, table, region_stride, block_stride, blocks_per_region, qk_scale, window,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, ONE_REGION: tl.constexpr, WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Attend to keys lower : upper, BLOCK_N at once. MASKED: some rows do not see some of them."""
    d = tl.arange(0, PADDED_DIM)
    for start in range(lower, upper, BLOCK_N):
        key_at = start + tl.arange(0, BLOCK_N)
        # Beyond the end: the null block, which can be read.
        block = tl.load(table + key_at // BLOCK_SIZE, mask=key_at < end, other=0)
        if ONE_REGION:
            first = block.to(tl.int64) * block_stride
        else:
            region = block // blocks_per_region
            inner = block - region * blocks_per_region
            first = region.to(tl.int64) * region_stride + inner.to(tl.int64) * block_stride
        offsets = (first + key_at % BLOCK_SIZE * HEAD_DIM)[:, None] + d[None, :]
        if HEAD_DIM == PADDED_DIM:
            k = tl.load(keys + offsets)
        else:
            k = tl.load(keys + offsets, mask=(d < HEAD_DIM)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * qk_scale
        if MASKED:
            seen = (key_at[None, :] <= query_at[:, None]) & (key_at < end)[None, :]
            if WINDOWED:
                seen &= key_at[None, :] > query_at[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # A row may not have seen any key yet.
        unseen = new_highest == float("-inf")
        finite = tl.where(unseen, 0.0, new_highest) if MASKED else new_highest
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(highest - finite)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        if MASKED:  # what lies beyond the end may be NaN, which even times 0 is NaN
            readable = (key_at < end)[:, None] & (d < HEAD_DIM)[None, :]
            v = tl.load(values + offsets, mask=readable, other=0.0)
        elif HEAD_DIM == PADDED_DIM:
            v = tl.load(values + offsets)
        else:
            v = tl.load(values + offsets, mask=(d < HEAD_DIM)[None, :], other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        highest = new_highest
    return acc, total, highest


@triton.jit
def attend(
    queries, out, keys, values, tables, items, partial, partial_lse,
    region_stride, block_stride, blocks_per_region, scale, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE_REGION: tl.constexpr,
    WINDOWED: tl.constexpr, ITEM_FIELDS: tl.constexpr, ONE_LOOP: tl.constexpr,
):  # fmt: skip
    """One piece and one KV head: TILE tokens, of each the heads that share it, are BLOCK_M rows."""
    item = items + tl.program_id(0) * ITEM_FIELDS
    row, count, position = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    table, part = tables + tl.load(item + 3), tl.load(item + 6)
    begin, end = tl.load(item + 4), tl.load(item + 5)
    if begin >= end:
        return
    kv_head = tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    keys += kv_head * BLOCK_SIZE * HEAD_DIM
    values += kv_head * BLOCK_SIZE * HEAD_DIM

    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, PADDED_DIM)
    token = r // GROUP
    query_at = position + token
    head_row = (row + token).to(tl.int64) * HEADS + kv_head * GROUP + r % GROUP
    row_offsets = head_row[:, None] * HEAD_DIM + d[None, :]
    is_row = (token < count)[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(queries + row_offsets, mask=is_row, other=0.0)
    acc = tl.zeros((BLOCK_M, PADDED_DIM), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    qk_scale = scale * _LOG2E

    if ONE_LOOP:
        acc, total, highest = _over_keys(
            acc, total, highest, q, query_at, begin, end, end,
            keys, values, table, region_stride, block_stride, blocks_per_region, qk_scale, window,
            HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, ONE_REGION, WINDOWED, True,
        )  # fmt: skip
    else:
        # Every row sees the keys in the middle: those need no mask.
        lead_end = begin
        if WINDOWED:
            hidden = tl.maximum(0, position + count - window - begin)
            lead_end = tl.minimum(begin + (hidden + BLOCK_N - 1) // BLOCK_N * BLOCK_N, end)
            acc, total, highest = _over_keys(
                acc, total, highest, q, query_at, begin, lead_end, end,
                keys, values, table, region_stride, block_stride, blocks_per_region, qk_scale,
                window, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, ONE_REGION, WINDOWED, True,
            )  # fmt: skip
        whole = tl.maximum(0, tl.minimum(end, position + 1) - lead_end) // BLOCK_N * BLOCK_N
        acc, total, highest = _over_keys(
            acc, total, highest, q, query_at, lead_end, lead_end + whole, end,
            keys, values, table, region_stride, block_stride, blocks_per_region, qk_scale, window,
            HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, ONE_REGION, WINDOWED, False,
        )  # fmt: skip
        acc, total, highest = _over_keys(
            acc, total, highest, q, query_at, lead_end + whole, end, end,
            keys, values, table, region_stride, block_stride, blocks_per_region, qk_scale, window,
            HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, ONE_REGION, WINDOWED, True,
        )  # fmt: skip

    # A row may see no key of this piece; another piece has its own.
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if part < 0:
        tl.store(out + row_offsets, acc.to(out.dtype.element_ty), mask=is_row)
    else:
        slot = (part.to(tl.int64) * KV_HEADS + kv_head) * (TILE * GROUP) + r
        tl.store(partial + slot[:, None] * HEAD_DIM + d[None, :], acc, mask=is_row)
        lse = tl.where(total == 0.0, float("-inf"), highest + tl.log2(total))
        tl.store(partial_lse + slot, lse, mask=token < count)


@triton.jit
def merge(
    partial, partial_lse, merges, out,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, TILE: tl.constexpr, MERGE_FIELDS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """One head of one token: the mean of its parts, weighted by what each saw."""
    entry = merges + tl.program_id(0) * MERGE_FIELDS
    num_parts = tl.load(entry + 2)
    if num_parts == 0:
        return
    row, first, place = tl.load(entry), tl.load(entry + 1), tl.load(entry + 3)
    head = tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    d = tl.arange(0, PADDED_DIM)
    acc = tl.zeros((PADDED_DIM,), tl.float32)
    total = 0.0
    highest = float("-inf")
    for start in range(0, num_parts, PARTS):
        number = start + tl.arange(0, PARTS)
        exists = number < num_parts
        part = (first + number).to(tl.int64)
        slot = (part * KV_HEADS + head // GROUP) * (TILE * GROUP) + place * GROUP + head % GROUP
        lse = tl.load(partial_lse + slot, mask=exists, other=float("-inf"))
        new_highest = tl.maximum(highest, tl.max(lse, 0))
        finite = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(lse - finite)
        shrink = tl.exp2(highest - finite)
        readable = exists[:, None] & (d < HEAD_DIM)[None, :]
        found = tl.load(partial + slot[:, None] * HEAD_DIM + d[None, :], mask=readable, other=0.0)
        acc = acc * shrink + tl.sum(found * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        highest = new_highest
    at = (row.to(tl.int64) * HEADS + head) * HEAD_DIM + d
    tl.store(out + at, (acc / total).to(out.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit
def norm_rows(
    x, residual, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    """One row's RMS norm; ADD: of its sum with the residual, which it becomes."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    values = tl.load(x + row + column, mask=inside, other=0.0)
    if ADD:
        before = tl.load(residual + row + column, mask=inside, other=0.0)
        values = (values.to(tl.float32) + before.to(tl.float32)).to(values.dtype)
        tl.store(residual + row + column, values, mask=inside)
    wide = values.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, (wide * scale * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    """GELU by its approximation with tanh, or SiLU: both are x times a sigmoid."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(gate_up + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0)
    z = x
    if GELU:
        z = _TWICE_SQRT_2_BY_PI * x * (1.0 + 0.044715 * x * x)
    found = x / (1.0 + tl.exp(-z)) * up.to(tl.float32)
    tl.store(out + row * WIDTH + column, found.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_and_write(
    qkv, queries, keys, values, slots, cos, sin, query_norm, key_norm,
    region_stride, block_stride, blocks_per_region, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, NORMED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """AT_ONCE heads of one token: queries to `queries`, keys and values to the token's slot.

    A token without a slot (-1) is written nowhere.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    HALF: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, PADDED_HALF)
    in_half = d < HALF
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & in_half[None, :]
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head)[:, None] * HEAD_DIM + d[None, :]
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    is_query = (head < HEADS)[:, None]
    is_value = (head >= HEADS + KV_HEADS)[:, None]

    turned_low, turned_high = low, high
    if NORMED:
        mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM
        scale = (1.0 / tl.sqrt(mean + eps))[:, None]
        query_low = tl.load(query_norm + d, mask=in_half, other=0.0).to(tl.float32)[None, :]
        query_high = tl.load(query_norm + HALF + d, mask=in_half, other=0.0).to(tl.float32)[None, :]
        key_low = tl.load(key_norm + d, mask=in_half, other=0.0).to(tl.float32)[None, :]
        key_high = tl.load(key_norm + HALF + d, mask=in_half, other=0.0).to(tl.float32)[None, :]
        turned_low = low * scale * tl.where(is_query, query_low, key_low)
        turned_high = high * scale * tl.where(is_query, query_high, key_high)
    c = tl.load(cos + token * HALF + d, mask=in_half, other=0.0)[None, :]
    s = tl.load(sin + token * HALF + d, mask=in_half, other=0.0)[None, :]
    new_low = tl.where(is_value, low, turned_low * c - turned_high * s)
    new_high = tl.where(is_value, high, turned_high * c + turned_low * s)
    new_low = new_low.to(qkv.dtype.element_ty)
    new_high = new_high.to(qkv.dtype.element_ty)

    target = (token * HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(queries + target, new_low, mask=inside & is_query)
    tl.store(queries + target + HALF, new_high, mask=inside & is_query)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    region = block // blocks_per_region
    start = region * region_stride + (block - region * blocks_per_region) * block_stride
    kv_head = tl.where(head >= HEADS + KV_HEADS, head - HEADS - KV_HEADS, head - HEADS)
    at = start + (kv_head[:, None] * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM + d[None, :]
    is_key = inside & (is_query == 0) & (is_value == 0)
    tl.store(keys + at, new_low, mask=is_key)
    tl.store(keys + at + HALF, new_high, mask=is_key)
    tl.store(values + at, new_low, mask=inside & is_value)
    tl.store(values + at + HALF, new_high, mask=inside & is_value)
