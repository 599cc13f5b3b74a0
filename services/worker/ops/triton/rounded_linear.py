"""Products of whole numbers (W8A8): rows are rounded to int8, each by a scale of its own, and multiplied with weights
that are int8; the tensor cores sum in int32, exactly, whatever the order. Scales are applied to what comes out.

Bytes of n rows: rounding reads n · in · itemsize and writes n · (in + 4); the product reads out · (in + 4) of weights
and n · (in + 4), and writes n · out · itemsize. Operations: 2 · n · out · in, at twice bfloat16's rate.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.gpu import HOPPER, generation
from services.worker.ops.quantized import QuantizedWeight
from services.worker.ops.triton.dependent_launch import launch_options, wait_for_inputs
from services.worker.ops.triton.moe.grouped_products import scaled
from services.worker.ops.triton.products import part, times
from services.worker.ops.triton.quantized_linear import typed_codes
from services.worker.ops.triton.row_ops import Int8Rows, round_rows

TILE_ROWS = (16, 64, 128)
"""Rows of a tile: of the smallest that holds them all, else of the largest."""


class RoundedTile(NamedTuple):
    """The tile of a product of some rows with some outputs."""

    rows: int
    columns: int
    depth: int
    """Inputs that are summed at a time."""
    swapped: bool
    """The weights are the product's first factor: a tensor core wants 64 rows of that, and few of the second."""
    num_warps: int
    num_stages: int


@cache
def rounded_tile(rows: int, generation: int) -> RoundedTile:
    """The tile of at most `rows` rows. Chosen from what the compiler makes of them for sm_80 and sm_90 and by counting;
    not yet by measuring."""
    if rows <= 16:
        return RoundedTile(16, 64, 256, True, num_warps=4, num_stages=3)
    if rows <= 64:
        return RoundedTile(64, 64, 128, False, num_warps=4, num_stages=4)
    depth, stages = (128, 4) if generation >= HOPPER else (64, 4)
    return RoundedTile(128, 128, depth, False, num_warps=8, num_stages=stages)


def rounded_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """x [n, in] → x @ weight.T + bias [n, out] in x's dtype, rows rounded first; `bias` is added before it is rounded.
    `weight`: int8 with a scale for each output."""
    out = x.new_empty(len(x), len(weight.codes))
    _launch(next((rows for rows in TILE_ROWS if len(x) <= rows), TILE_ROWS[-1]), round_rows(x), weight, bias, out)
    return out


def compile_tiles(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> None:
    """Runs the kernels on `x` [1, in] in all sizes of tiles: what is compiled now holds nobody up later."""
    rounded = round_rows(x)
    for rows in TILE_ROWS:
        _launch(rows, rounded, weight, bias, x.new_empty(1, len(weight.codes)))


def _launch(tile_rows: int, rows: Int8Rows, weight: QuantizedWeight, bias: Tensor | None, out: Tensor) -> None:
    outputs, inputs = weight.codes.shape
    tile = rounded_tile(tile_rows, generation(out.device))
    grid = (triton.cdiv(len(out), tile.rows) * triton.cdiv(outputs, tile.columns),)
    rounded_linear_kernel[grid](
        *(*rows, typed_codes(weight), weight.scales, bias, out, len(out)),
        INPUTS=inputs,
        OUTPUTS=outputs,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        SWAPPED=tile.swapped,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch_options(out.device),
    )


@triton.jit(do_not_specialize=["rows"])
def rounded_linear_kernel(
    codes,
    row_scales,
    weights,
    scales,
    bias,
    out,
    rows,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SWAPPED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One tile of rows times some outputs a program; those that read the same weights run beside each other. `bias` may
    be None."""
    wait_for_inputs(DEPENDENT)
    tall = tl.cdiv(rows, ROWS)
    row = tl.program_id(0) % tall * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) // tall * COLUMNS + tl.arange(0, COLUMNS)
    there = (row < rows)[:, None]
    # Outputs beyond the last are computed as the last, and not stored.
    held = tl.minimum(column, OUTPUTS - 1)
    depth = tl.arange(0, DEPTH)
    values = codes + row.to(tl.int64)[:, None] * INPUTS + depth[None, :]
    matrix = weights + held.to(tl.int64)[:, None] * INPUTS + depth[None, :]
    total = tl.zeros([COLUMNS, ROWS] if SWAPPED else [ROWS, COLUMNS], tl.int32)
    for start in tl.range(0, INPUTS, DEPTH):
        factors = part(values, there, depth, start, INPUTS, DEPTH)
        total = times(factors, part(matrix, True, depth, start, INPUTS, DEPTH), total, SWAPPED)
        values += DEPTH
        matrix += DEPTH
    made = scaled(total, tl.load(row_scales + row, mask=row < rows, other=0.0), tl.load(scales + held), SWAPPED)
    if SWAPPED:
        made = tl.trans(made)
    if bias is not None:
        made += tl.load(bias + held).to(tl.float32)[None, :]
    tl.store(
        out + row.to(tl.int64)[:, None] * OUTPUTS + column[None, :],
        made.to(out.dtype.element_ty),
        mask=there & (column < OUTPUTS)[None, :],
    )
