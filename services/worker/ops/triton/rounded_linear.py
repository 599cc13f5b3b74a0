"""Products of codes with codes (W8A8): rows are rounded to int8 or fp8, each by a scale of its own, and multiplied with
weights that are the same. Scales are applied to what comes out. The tensor cores sum int8 in int32, exactly, whatever
the order, and fp8 in float32; of fp8 the product is PyTorch's, where it has one.

Bytes of n rows: rounding reads n · in · itemsize and writes n · (in + 4); the product reads out · (in + 4) of weights
and n · (in + 4), and writes n · out · itemsize. Operations: 2 · n · out · in, at twice bfloat16's rate.

Tiles were chosen by measuring on an H200 (Triton 3.6, 2026-11-27), out of about 10 for each number of rows. µs of both
launches with Llama-3.1-8B's weights out of the caches, and of bfloat16's product:

    out × in       1 row         16            64            256           2048
    6144 × 4096     9.5 / 13.9    9.8 / 15.3   11.6 / 16.5   18.9 / 21.8    85 / 129
    4096 × 4096     8.1 /  9.9    8.3 / 10.7   10.2 / 11.2   18.2 / 16.5    59 /  86
    28672 × 4096   32.0 / 54.4   33.4 / 57.5   36.3 / 62.7   62.3 / 89.4   365 / 596
    4096 × 14336   20.1 / 29.3   20.8 / 30.5   23.2 / 35.7   53.1 / 46.8   200 / 287
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.gpu import HOPPER, generation
from services.worker.ops.quantized import QuantizedWeight
from services.worker.ops.triton.codes import typed_codes
from services.worker.ops.triton.dependent_launch import launch_options, wait_for_inputs
from services.worker.ops.triton.moe.grouped_products import scaled, sums_dtype
from services.worker.ops.triton.products import part, times
from services.worker.ops.triton.row_ops import CodedRows, round_rows
from services.worker.ops.triton.splits import split_inputs, split_sums, splits_of, store_split, sum_splits

TILED_ROWS = (16, 64, 256, 1 << 16)
"""Numbers of rows up to which tiles are the same."""
_MANY_OUTPUTS = 16384
"""From so many on there are several programs for each multiprocessor, however wide they are."""
_MULTIPROCESSORS = 132
"""Of an H100 and an H200."""


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
    splits: int = 1
    """Programs that share a tile, each of which sums a part of the inputs."""


@cache
def rounded_tile(rows: int, outputs: int, generation: int) -> RoundedTile:
    """The tile of at most `rows` rows. Those on Hopper were measured on an H200; others were chosen from what the
    compiler makes of them for sm_80 and by counting."""
    if generation < HOPPER:
        if rows <= 16:
            return RoundedTile(16, 64, 256, True, num_warps=4, num_stages=3)
        if rows <= 64:
            return RoundedTile(64, 64, 128, False, num_warps=4, num_stages=4)
        return RoundedTile(128, 128, 64, False, num_warps=8, num_stages=4)
    many = outputs >= _MANY_OUTPUTS
    if rows <= 16:
        depth, stages = (128, 8) if many else (256, 6)
        return RoundedTile(16, 64, depth, True, num_warps=4, num_stages=stages)
    if rows <= 64:
        if many:
            return RoundedTile(64, 64, 128, True, num_warps=4, num_stages=6)
        splits = splits_of(triton.cdiv(outputs, 64), _MULTIPROCESSORS)
        return RoundedTile(64, 64, 256, True, num_warps=4, num_stages=4, splits=splits)
    if rows <= 256 and not many:
        return RoundedTile(128, 64, 128, False, num_warps=4, num_stages=4)
    return RoundedTile(128, 128, 128, True, num_warps=4, num_stages=3)


def rounded_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """x [n, in] → x @ weight.T + bias [n, out] in x's dtype, rows rounded first; `bias` is added before it is rounded.
    `weight`: int8 or fp8 with a scale for each output."""
    rows = round_rows(x, weight.code)
    if _library_multiplies(x.dtype, weight):
        product: Tensor = torch._scaled_mm(
            *(rows.codes, typed_codes(weight).T, rows.scales[:, None], weight.scales.view(1, -1), bias),
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
        return product
    out = x.new_empty(len(x), len(weight.codes))
    _launch(next((most for most in TILED_ROWS if len(x) <= most), TILED_ROWS[-1]), rows, weight, bias, out)
    return out


def _library_multiplies(dtype: torch.dtype, weight: QuantizedWeight) -> bool:
    """Whether PyTorch has a product of rows with such a weight that gives `dtype`."""
    outputs, inputs = weight.codes.shape
    if weight.code != "fp8" or dtype != torch.bfloat16 or outputs % 16 or inputs % 16:
        return False
    return library_multiplies_fp8(weight.codes.device)


@cache
def library_multiplies_fp8(device: torch.device) -> bool:
    """Whether PyTorch multiplies fp8 there with a scale for each row and output, found out by trying: not on all
    devices with tensor cores for it (compute capability 12.0: pytorch/pytorch#192707)."""
    codes = torch.zeros(16, 16, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.ones(16, 1, device=device)
    try:
        torch._scaled_mm(codes, codes.T, scales, scales.T, out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError):
        return False
    return True


def compile_tiles(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> None:
    """Runs the kernels on `x` [1, in] in all sizes of tiles: what is compiled now holds nobody up later."""
    if _library_multiplies(x.dtype, weight):
        rounded_linear(x, weight, bias)
        return
    rounded = round_rows(x, weight.code)
    for rows in TILED_ROWS:
        _launch(rows, rounded, weight, bias, x.new_empty(1, len(weight.codes)))


def _launch(tiled_rows: int, rows: CodedRows, weight: QuantizedWeight, bias: Tensor | None, out: Tensor) -> None:
    outputs, inputs = weight.codes.shape
    tile = rounded_tile(tiled_rows, outputs, generation(out.device))
    grid = (triton.cdiv(len(out), tile.rows) * triton.cdiv(outputs, tile.columns), tile.splits)
    rounded_linear_kernel[grid](
        *(*rows, typed_codes(weight), weight.scales, bias, out),
        *(*split_sums(out, tile.splits, torch.float32 if weight.code == "fp8" else torch.int32), len(out)),
        INPUTS=inputs,
        OUTPUTS=outputs,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        SPLITS=tile.splits,
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
    sums,
    arrived,
    rows,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    SWAPPED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (tiles of rows and outputs, splits of the inputs); those that read the same weights run beside each other.
    `bias` may be None."""
    wait_for_inputs(DEPENDENT)
    tall = tl.cdiv(rows, ROWS)
    row = tl.program_id(0) % tall * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) // tall * COLUMNS + tl.arange(0, COLUMNS)
    there = (row < rows)[:, None]
    # Outputs beyond the last are computed as the last, and not stored.
    held = tl.minimum(column, OUTPUTS - 1)
    first, end = split_inputs(INPUTS, DEPTH, SPLITS)
    depth = tl.arange(0, DEPTH)
    values = codes + row.to(tl.int64)[:, None] * INPUTS + (first + depth)[None, :]
    matrix = weights + held.to(tl.int64)[:, None] * INPUTS + (first + depth)[None, :]
    total = tl.zeros([COLUMNS, ROWS] if SWAPPED else [ROWS, COLUMNS], sums_dtype(codes.dtype.element_ty))
    for start in tl.range(first, end, DEPTH):
        factors = part(values, there, depth, start, INPUTS, DEPTH)
        total = times(factors, part(matrix, True, depth, start, INPUTS, DEPTH), total, SWAPPED)
        values += DEPTH
        matrix += DEPTH
    if SWAPPED:
        total = tl.trans(total)
    to = row.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
    inside = there & (column < OUTPUTS)[None, :]
    if SPLITS > 1:
        if not store_split(total, sums + to, arrived, inside, rows.to(tl.int64) * OUTPUTS, SPLITS):
            return
        total = sum_splits(sums + to, inside, rows.to(tl.int64) * OUTPUTS, SPLITS, total)
    made = scaled(total, tl.load(row_scales + row, mask=row < rows, other=0.0), tl.load(scales + held), False)
    if bias is not None:
        made += tl.load(bias + held).to(tl.float32)[None, :]
    tl.store(out + to, made.to(out.dtype.element_ty), mask=inside)
