"""Tiles of matrices and their products, as kernels use them."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run in Triton's interpreter, which multiplies the bits of bfloat16 as if they were integers."""


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in float32, of int8 in int32. Factors of float32 lose nothing that matters: three products of TF32
    each. Of sums of fp8 Hopper keeps about 14 bits (DeepSeek-V3, arXiv:2412.19437), which is more than rows have."""
    if a.dtype == tl.int8:
        acc = tl.dot(a, b, acc, out_dtype=tl.int32)
    elif INTERPRETED:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    elif a.dtype == tl.float32:
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def part(pointers, there, depth, start, WHOLE: tl.constexpr, DEPTH: tl.constexpr):
    """A tile [rows, DEPTH] of a matrix with rows of WHOLE elements; zeros beyond them, and in rows not there."""
    if WHOLE % DEPTH == 0:
        values = tl.load(pointers, mask=there, other=0.0)
    else:
        values = tl.load(pointers, mask=there & (depth < WHOLE - start)[None, :], other=0.0)
    return values


@triton.jit
def times(values, weights, total, SWAPPED: tl.constexpr):
    """total + values @ weightsᵀ, or that transposed."""
    if SWAPPED:
        total = dot(weights, tl.trans(values), total)
    else:
        total = dot(values, tl.trans(weights), total)
    return total
