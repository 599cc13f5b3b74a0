"""What decode and prefill attention share on the device: where a tile of cached tokens lies, and one step of softmax.

Softmax runs online (Milakov and Gimelshein, arXiv:1805.02867) and in powers of two, as `exp2` is one instruction:
whoever calls has multiplied scores by log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl

from shared.blocks import BLOCK_SIZE

BLOCK = tl.constexpr(BLOCK_SIZE)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def cached_rows(table, tokens, there, kv_head, KV_HEADS: tl.constexpr):
    """Which rows of a cache, as [rows, D], hold `tokens` of the sequence whose block table this is (int64).

    `there`: for which of them the table may be read; None is all.
    """
    if there is None:
        blocks = tl.load(table + tokens // BLOCK)
    else:
        blocks = tl.load(table + tokens // BLOCK, mask=there, other=0)
    return (blocks.to(tl.int64) * KV_HEADS + kv_head) * BLOCK + tokens % BLOCK


@triton.jit
def cached_tile(cache, at, there, dims, DIM: tl.constexpr):
    """The elements `at` [tokens, dims] of a cache; zeros for tokens that are not `there`, and beyond DIM."""
    if there is None:
        if dims.shape[0] == DIM:
            tile = tl.load(cache + at)
        else:
            tile = tl.load(cache + at, mask=(dims < DIM)[None, :], other=0.0)
    elif dims.shape[0] == DIM:
        tile = tl.load(cache + at, mask=there[:, None], other=0.0)
    else:
        tile = tl.load(cache + at, mask=there[:, None] & (dims < DIM)[None, :], other=0.0)
    return tile


@triton.jit
def queries_for(cache, queries):
    """`queries` in the type in which they meet what is cached.

    Float8 widens to float16 by one instruction for two numbers, to bfloat16 by several slow ones for each. No query
    that means anything is beyond float16, and none within its range loses a bit that bfloat16 has.
    """
    if cache.dtype.element_ty.is_fp8():
        if queries.dtype == tl.bfloat16:
            queries = tl.clamp(queries.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    return queries


@triton.jit
def scaled_scores(products, scale, SOFTCAP: tl.constexpr):
    """Scores as powers of two: q·k times `scale`, capped to ±SOFTCAP where there is one."""
    if SOFTCAP is None:
        scores = products * (scale * LOG2_E)
    else:
        # tanh(x) = 2 sigmoid(2x) - 1: exact enough in float32, and no call into a library.
        scores = (SOFTCAP * LOG2_E) * (2.0 * tl.sigmoid(products * (2.0 * scale / SOFTCAP)) - 1.0)
    return scores
