"""Operations on single rows: RMS norm, alone or fused with the addition of the residual before it; the gated activation
of an MLP, act(gate) · up, out of what one product gave both; and rounding to int8 or fp8.

Bytes moved, n rows of h elements of b bytes: `rms_norm` 2·n·h·b, `add_rms_norm` 4·n·h·b, and h·4 of weights, which stay
in the caches; `gated_act` 3·n·I·b for I activations; `round_rows` n·h·(b + 1) + n·4. Each row is read once and held in
registers.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.activation import limit_of
from services.worker.ops.interface import (
    Activation,
)
from services.worker.ops.quantized import Code
from services.worker.ops.triton.dependent_launch import launch_options, wait_for_inputs
from services.worker.ops.triton.products import INTERPRETED

MAX_HIDDEN = 32768
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
    if hidden > MAX_HIDDEN:
        raise ValueError(f"a hidden size of {hidden} is more than the {MAX_HIDDEN} that the norm kernel holds")
    block = triton.next_power_of_2(hidden)
    return block, min(32, max(1, block // 512))


def _launch(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float, *, add: bool) -> None:
    hidden = x.shape[-1]
    block, warps = norm_shape(hidden)
    grid = (x.numel() // hidden,)
    rms_norm_kernel[grid](
        *(x, residual, weight, out, eps),
        HIDDEN=hidden,
        ADD=add,
        BLOCK=block,
        num_warps=warps,
        **launch_options(x.device),
    )


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    eps,
    HIDDEN: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One row a program. `out` may be `x`."""
    wait_for_inputs(DEPENDENT)
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


BLOCK = 1024


def gating(kind: Activation) -> dict[str, str | float]:
    """The constants of `gated_sums`."""
    name, limit = limit_of(kind)
    return {"KIND": name, "LIMIT": limit}


def gated_act(gate_up: Tensor, kind: Activation) -> Tensor:
    """gate_up [n, 2 * I] (gate, then up) → act(gate) * up [n, I]; act(gate) is rounded to its dtype, as in PyTorch."""
    rows, both = gate_up.shape
    width = both // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    gated_act_kernel[(rows, triton.cdiv(width, BLOCK))](
        *(gate_up, out),
        WIDTH=width,
        **gating(kind),
        BLOCK=BLOCK,
        num_warps=4,
        **launch_options(gate_up.device),
    )
    return out


@triton.jit
def activated(gate, KIND: tl.constexpr):
    """act(gate), float32."""
    if KIND == "silu":
        logit = gate
    else:
        # gelu's 0.5 · (1 + tanh(u)) is the logistic function of 2u, with u = sqrt(2 / π) · (x + 0.044715 · x³).
        logit = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    # Below -88 the power would overflow, and the quotient is 0 all the same.
    return gate / (1.0 + tl.exp(-tl.maximum(logit, -88.0)))


@triton.jit
def gated_sums(gate, up, KIND: tl.constexpr, LIMIT: tl.constexpr):
    """What an MLP makes of gates and ups, float32; see `Activation`."""
    if LIMIT > 0.0:
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    if KIND == "swigluoai":
        gate = tl.minimum(gate, LIMIT)
        logit = tl.maximum(1.702 * gate, -88.0)
        made = gate / (1.0 + tl.exp(-logit)) * (up + 1.0)
    elif KIND == "silu_limited":
        made = activated(tl.minimum(gate, LIMIT), "silu") * up
    elif KIND == "swiglustep":
        made = tl.minimum(activated(gate, "silu"), LIMIT) * up
    else:
        made = activated(gate, KIND) * up
    return made


@triton.jit
def gated_of(gate, up, dtype: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr):
    """Likewise, float32, where act(gate) is rounded to `dtype` between, as PyTorch does it."""
    if LIMIT > 0.0:
        made = gated_sums(gate, up, KIND, LIMIT)
    else:
        made = activated(gate, KIND).to(dtype).to(tl.float32) * up
    return made


@triton.jit
def of_outputs(terms, expert, column, WIDTH: tl.constexpr):
    """Those of an expert's outputs `column`, of terms [E, WIDTH]. Beyond the last they are the last one's."""
    return tl.load(terms + expert * WIDTH + tl.minimum(column, WIDTH - 1))


@triton.jit
def gated_act_kernel(
    gate_up,
    out,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A part of one row a program."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    made = gated_of(gate, up, out.dtype.element_ty, KIND, LIMIT)
    tl.store(out + row * WIDTH + column, made.to(out.dtype.element_ty), mask=inside)


_INT8_MAX = tl.constexpr(127.0)
_FP8_MAX = tl.constexpr(448.0)
_SMALLEST_ROW = tl.constexpr(1e-30)
"""As `round_rows` has it."""
_NEAREST = tl.constexpr(12582912.0)
"""1.5 · 2²³: what is added to it has no digits behind the point, and is rounded to the nearest, ties to even."""
_INFINITY = tl.constexpr(0x7F800000)


class CodedRows(NamedTuple):
    """Rows as codes, each by a scale of its own."""

    codes: Tensor
    """int8 or float8_e4m3fn [n, in]"""
    scales: Tensor
    """float32 [n]; NaN where an element is none, or is infinite."""


def round_rows(x: Tensor, code: Code) -> CodedRows:
    """x [n, in] to the nearest of int8 or fp8, as `quantized.round_rows` does it, with the same bits."""
    rows, inputs = x.shape
    rounded = CodedRows(
        torch.empty(rows, inputs, dtype=torch.float8_e4m3fn if code == "fp8" else torch.int8, device=x.device),
        torch.empty(rows, dtype=torch.float32, device=x.device),
    )
    block, warps = norm_shape(inputs)
    round_rows_kernel[(rows,)](
        *(x, *rounded),
        INPUTS=inputs,
        BLOCK=block,
        num_warps=warps,
        enable_fp_fusion=False,  # the product is rounded before what rounds it to the nearest is added
        **launch_options(x.device),
    )
    return rounded


@triton.jit
def round_rows_kernel(x, codes, scales, INPUTS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """One row a program."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0)
    start = row.to(tl.int64) * INPUTS
    column = tl.arange(0, BLOCK)
    inside = column < INPUTS
    values = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    # Bits of numbers that are not negative have their order, and those of NaN are the greatest.
    bits = tl.max(tl.abs(values).to(tl.int32, bitcast=True), 0)
    most = bits.to(tl.float32, bitcast=True)
    counts = (most > _SMALLEST_ROW) & (bits < _INFINITY)
    FP8: tl.constexpr = codes.dtype.element_ty == tl.float8e4nv
    greatest = tl.full([], _FP8_MAX if FP8 else _INT8_MAX, tl.float32)
    most = tl.where(counts, most, greatest)
    inverse = tl.div_rn(greatest, most)
    scale = tl.where(counts, tl.div_rn(most, greatest), 0.0)
    values = tl.where(counts, values, 0.0) * inverse
    if FP8:
        code = _float8(values)
    else:
        code = (values + _NEAREST - _NEAREST).to(tl.int8)
    tl.store(codes + start + column, code, mask=inside)
    tl.store(scales + row, tl.where(bits < _INFINITY, scale, float("nan")))


@triton.jit
def _float8(values):
    """To the nearest, ties to even."""
    if INTERPRETED:  # where the greatest of a power of two's numbers would become its least
        bits = values.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        tiny = values + _NEAREST / 512 - _NEAREST / 512
        values = tl.where(tl.abs(values) < 2.0**-6, tiny, nearest.to(tl.float32, bitcast=True))
    return values.to(tl.float8e4nv)
