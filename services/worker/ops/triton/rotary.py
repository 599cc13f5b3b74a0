"""From one product's queries, keys and values to what attention reads: norm of heads, rotation, and the write to the
paged cache, in one pass.

Bytes moved, n rows of H query and KV key heads of D elements of b bytes, c bytes in the cache:
n · ((2·H + 2·KV)·D·b + 2·KV·D·c), and n·D·4 of cosines and sines, which a row's heads share.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.triton.dependent_launch import launch_options, wait_for_inputs

_HEADS = 8
"""Heads of one program, at the most."""
_FP8_MOST = 448.0
"""The greatest number of float8_e4m3fn: what is more would become NaN."""


def rope_and_store(
    qkv: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """qkv [n, (H + 2 * KV) * D] → rotated queries [n, H, D]; keys and values go to `slots` [n] of the caches
    [blocks, KV, block_size, D].

    A slot is block * block_size + offset; a row whose slot is -1 is padding and stores nothing, but its position must
    be one that `cos_sin` has. `cos_sin`: float32 [positions, D], D/2 cosines, then D/2 sines; element i is rotated with
    i + D/2. Norm weights, float32 [D], go with the heads' RMS norm before that, whose result is rounded to qkv's dtype.

    Caches may be float8_e4m3fn: they hold keys / `k_scale` and values / `v_scale` (float32 [1], 1 where None), cut to
    what the type holds.
    """
    _, kv_heads, block_size, head_dim = k_cache.shape
    rows = len(qkv)
    q = torch.empty((rows, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    group, half, warps = rope_shape(heads, kv_heads, head_dim)
    grid = (rows, triton.cdiv(heads, group) + 2 * triton.cdiv(kv_heads, group))
    rope_and_store_kernel[grid](
        *(qkv, slots, positions, cos_sin, k_cache, v_cache, q),
        *(q_norm, k_norm, k_scale, v_scale, eps),
        HEADS=heads,
        KV=kv_heads,
        DIM=head_dim,
        HALF=half,
        GROUP=group,
        TOKENS=block_size,
        MOST=_FP8_MOST if k_cache.dtype == torch.float8_e4m3fn else None,
        num_warps=warps,
        **launch_options(qkv.device),
    )
    return q


@cache
def rope_shape(heads: int, kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """(heads, elements of half a head, warps) of a program."""
    group = min(_HEADS, triton.next_power_of_2(max(heads, kv_heads)))
    half = triton.next_power_of_2(head_dim // 2)
    return group, half, min(4, max(1, group * half // 256))


@triton.jit
def _normed(low, high, weight, element, inside, eps, DIM: tl.constexpr, dtype: tl.constexpr):
    """Heads [GROUP, HALF] twice, each RMS-normed over both halves and rounded."""
    squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
    scale = tl.rsqrt(squares / DIM + eps)[:, None]
    low *= scale * tl.load(weight + element, mask=inside, other=0.0)[None, :]
    high *= scale * tl.load(weight + DIM // 2 + element, mask=inside, other=0.0)[None, :]
    return low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)


@triton.jit
def _into(value, scale, dtype: tl.constexpr, MOST: tl.constexpr):
    """As the cache holds it."""
    if scale is not None:
        value /= tl.load(scale)
    if MOST is not None:
        value = tl.minimum(tl.maximum(value, -MOST), MOST)
    return value.to(dtype)


@triton.jit
def _store(cells, low, high, scale, stored, DIM: tl.constexpr, MOST: tl.constexpr):
    """Both halves of heads to a cache."""
    tl.store(cells, _into(low, scale, cells.dtype.element_ty, MOST), mask=stored)
    tl.store(cells + DIM // 2, _into(high, scale, cells.dtype.element_ty, MOST), mask=stored)


@triton.jit
def rope_and_store_kernel(
    qkv,
    slots,
    positions,
    cos_sin,
    k_cache,
    v_cache,
    q,
    q_norm,
    k_norm,
    k_scale,
    v_scale,
    eps,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    MOST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A group of heads of one row a program: first the query heads' groups, then the keys', then the values'."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    Q_PARTS: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    KV_PARTS: tl.constexpr = (KV + GROUP - 1) // GROUP
    element = tl.arange(0, HALF)
    inside = element < DIM // 2
    slot = tl.load(slots + row)
    block, offset = (slot // TOKENS).to(tl.int64), slot % TOKENS
    if part < Q_PARTS:
        first, count, part_of = 0, HEADS, part
    elif part < Q_PARTS + KV_PARTS:
        first, count, part_of = HEADS, KV, part - Q_PARTS
    else:
        first, count, part_of = HEADS + KV, KV, part - Q_PARTS - KV_PARTS
    head = part_of * GROUP + tl.arange(0, GROUP)
    there = (head < count)[:, None] & inside[None, :]
    source = qkv + row * ((HEADS + 2 * KV) * DIM) + (first + head)[:, None] * DIM + element[None, :]
    low = tl.load(source, mask=there, other=0.0).to(tl.float32)
    high = tl.load(source + DIM // 2, mask=there, other=0.0).to(tl.float32)
    cell = block * (KV * TOKENS * DIM) + (head[:, None] * TOKENS + offset) * DIM + element[None, :]
    stored = (head < tl.where(slot >= 0, count, 0))[:, None] & inside[None, :]
    if part >= Q_PARTS + KV_PARTS:
        _store(v_cache + cell, low, high, v_scale, stored, DIM, MOST)
    else:
        angles = cos_sin + tl.load(positions + row).to(tl.int64) * DIM + element
        cos = tl.load(angles, mask=inside, other=0.0)[None, :]
        sin = tl.load(angles + DIM // 2, mask=inside, other=0.0)[None, :]
        if part < Q_PARTS:
            if q_norm is not None:
                low, high = _normed(low, high, q_norm, element, inside, eps, DIM, q.dtype.element_ty)
            target = q + row * (HEADS * DIM) + head[:, None] * DIM + element[None, :]
            tl.store(target, (low * cos - high * sin).to(q.dtype.element_ty), mask=there)
            tl.store(target + DIM // 2, (high * cos + low * sin).to(q.dtype.element_ty), mask=there)
        else:
            if k_norm is not None:
                low, high = _normed(low, high, k_norm, element, inside, eps, DIM, q.dtype.element_ty)
            low, high = low * cos - high * sin, high * cos + low * sin
            _store(k_cache + cell, low, high, k_scale, stored, DIM, MOST)
