"""RMS norm of whole rows, alone and fused with the addition of the residual before it.

Bytes moved, n rows of h elements of b bytes: `rms_norm` 2·n·h·b, `add_rms_norm` 4·n·h·b; and h·4 of weights, which stay
in the caches. Each row is read once and held in registers.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_HIDDEN = 32768
"""So many elements of a row fit into a program's registers."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [n, hidden] / sqrt(mean(x²) + eps) * weight (float32 [hidden]), computed in float32, in x's dtype."""
    out = torch.empty_like(x)
    _launch(x, x, weight, out, eps, add=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual): the sum, rounded to their dtype, replaces `residual`; the norm is of what
    was rounded, and replaces `x`."""
    _launch(x, residual, weight, x, eps, add=True)
    return x, residual


@cache
def norm_shape(hidden: int) -> tuple[int, int]:
    """(elements, warps) of a program. Raises ValueError where a row does not fit into one."""
    if hidden > MOST_HIDDEN:
        raise ValueError(f"a hidden size of {hidden} is more than the {MOST_HIDDEN} that the norm kernel holds")
    block = triton.next_power_of_2(hidden)
    return block, min(32, max(1, block // 512))


def _launch(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float, *, add: bool) -> None:
    hidden = x.shape[-1]
    block, warps = norm_shape(hidden)
    grid = (x.numel() // hidden,)
    rms_norm_kernel[grid](x, residual, weight, out, eps, HIDDEN=hidden, ADD=add, BLOCK=block, num_warps=warps)


@triton.jit
def rms_norm_kernel(x, residual, weight, out, eps, HIDDEN: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """One row a program. `out` may be `x`."""
    start = tl.program_id(0).to(tl.int64) * HIDDEN
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    row = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        row += tl.load(residual + start + column, mask=inside, other=0.0).to(tl.float32)
        rounded = row.to(residual.dtype.element_ty)
        tl.store(residual + start + column, rounded, mask=inside)
        row = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, axis=0) / HIDDEN + eps)
    factors = tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + start + column, (row * scale * factors).to(out.dtype.element_ty), mask=inside)
