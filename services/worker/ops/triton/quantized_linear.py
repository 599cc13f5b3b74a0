"""Products of rows with weights that stay codes in memory (W8A16, W4A16): numbers are made of a tile of codes on its
way to the tensor cores.

Codes stand for whole numbers or float8's, which bfloat16 and float16 have exactly; scales are applied to sums in
float32, of a group of inputs or of all. So a product is that of the rounded weights within the rounding of its sums.

Bytes of n rows: out · in · (1, or ½ of int4) of codes, out · groups · 4 of scales (and · 1 of zero points, · 4 of
offsets), and n · (in + out) · itemsize. FLOPs: 2 · n · out · in.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.gpu import HOPPER, generation
from services.worker.ops.quantized import Code, QuantizedWeight
from services.worker.ops.triton.products import part, times

TILE_ROWS = (16, 64)
"""Rows of a tile: where there are no more, and where there are."""
MAX_ROWS = 64
"""Of more rows, a product of numbers that are made first costs less: each code is read once then, too."""
_FP8_GENERATION = 89
"""Compute capability from which float8 becomes other numbers by an instruction."""


class CodeTile(NamedTuple):
    """The tile of a product of some rows with some outputs."""

    rows: int
    columns: int
    depth: int
    """Inputs that are summed at a time; of one group."""
    swapped: bool
    """The weights are the product's first factor: a tensor core wants 64 rows of that, and few of the second."""
    num_warps: int
    num_stages: int


class CodedProduct(NamedTuple):
    """What a kernel is compiled for."""

    code: Code
    inputs: int
    outputs: int
    group: int
    """Inputs that share a scale."""


@cache
def code_tile(rows: int, itemsize: int, generation: int, group: int) -> CodeTile:
    """The tile of at most `rows` rows of elements of `itemsize` bytes. Chosen from what the compiler makes of them for
    sm_80 and sm_90 and by counting; not yet by measuring."""
    depth = min(32 if itemsize == 4 else 128 if rows <= 16 else 64, group if group % 16 == 0 else 16)
    depth = max(16, 1 << (depth.bit_length() - 1))
    if rows <= 16:
        return CodeTile(16, 64 if generation >= HOPPER else 32, depth, True, num_warps=4, num_stages=3)
    return CodeTile(64, 64, depth, False, num_warps=4, num_stages=3)


def multiplies(x: Tensor, weight: QuantizedWeight) -> bool:
    """Whether the kernel does the product of `x` with packed `weight` here, and as fast as any other way."""
    return len(x) <= MAX_ROWS and (weight.code != "fp8" or knows_fp8(x.device))


@cache
def knows_fp8(device: torch.device) -> bool:
    """Whether kernels read float8 there."""
    if device.type != "cuda":
        return True
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor >= _FP8_GENERATION


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """x [n, in] → x @ weight.T + bias [n, out] in x's dtype, `bias` added before it is rounded. `weight`: codes
    [out, in], those of int4 two to a byte (`pack_nibbles`)."""
    rows, inputs = x.shape
    outputs, groups = weight.scales.shape
    product = CodedProduct(weight.code, inputs, outputs, inputs // groups)
    out = x.new_empty(rows, outputs)
    _launch(product, TILE_ROWS[0] if rows <= TILE_ROWS[0] else TILE_ROWS[1], x, weight, bias, out)
    return out


def compile_tiles(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> None:
    """Runs the kernel on `x` [1, in] in all sizes of tiles: what is compiled now holds nobody up later."""
    outputs, groups = weight.scales.shape
    product = CodedProduct(weight.code, x.shape[1], outputs, x.shape[1] // groups)
    for rows in TILE_ROWS:
        _launch(product, rows, x, weight, bias, x.new_empty(1, outputs))


def _launch(
    product: CodedProduct, tile_rows: int, x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor
) -> None:
    tile = code_tile(tile_rows, x.element_size(), generation(x.device), product.group)
    columns = triton.cdiv(product.outputs, tile.columns)
    coded_linear_kernel[(columns * triton.cdiv(len(x), tile.rows),)](
        *(x, typed_codes(weight), *group_terms(weight), bias, out, len(x)),
        INPUTS=product.inputs,
        OUTPUTS=product.outputs,
        GROUP=product.group,
        CODE=product.code,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        SWAPPED=tile.swapped,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def typed_codes(weight: QuantizedWeight) -> Tensor:
    """The codes as what they are numbers of."""
    match weight.code:
        case "int8":
            return weight.codes.view(torch.int8)
        case "fp8":
            return weight.codes.view(torch.float8_e4m3fn)
        case "int4":
            return weight.codes


def group_terms(weight: QuantizedWeight) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What belongs to its groups, in the order of the kernels' arguments."""
    return weight.scales, weight.zeros, weight.offsets


@triton.jit(do_not_specialize=["rows"])
def coded_linear_kernel(
    x,
    codes,
    scales,
    zeros,
    offsets,
    bias,
    out,
    rows,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SWAPPED: tl.constexpr,
):
    """One tile of rows times some outputs a program. `zeros`, `offsets` and `bias` may be None."""
    WIDE: tl.constexpr = (OUTPUTS + COLUMNS - 1) // COLUMNS
    GROUPS: tl.constexpr = INPUTS // GROUP
    column = tl.program_id(0) % WIDE * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(0) // WIDE * ROWS + tl.arange(0, ROWS)
    there = (row < rows)[:, None]
    # Outputs beyond the last are read as the last, and not stored.
    held = tl.minimum(column, OUTPUTS - 1)
    depth = tl.arange(0, DEPTH)
    values = x + row.to(tl.int64)[:, None] * INPUTS + depth[None, :]
    if CODE == "int4":
        place = tl.arange(0, DEPTH // 2)
        coded = codes + held.to(tl.int64)[:, None] * (INPUTS // 2) + place[None, :]
    else:
        place = depth
        coded = codes + held.to(tl.int64)[:, None] * INPUTS + place[None, :]
    total = tl.zeros([COLUMNS, ROWS] if SWAPPED else [ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, INPUTS, DEPTH):
        factors = part(values, there, depth, start, INPUTS, DEPTH)
        group = held * GROUPS + start // GROUP
        if CODE == "int4":
            pairs = part(coded, True, place, start // 2, INPUTS // 2, DEPTH // 2)
            zero = 8
            if zeros is not None:
                zero = tl.load(zeros + group).to(tl.int8)[:, None]
            low, high = (pairs & 15).to(tl.int8) - zero, (pairs >> 4).to(tl.int8) - zero
            weights = tl.interleave(low, high).to(tl.float32).to(factors.dtype)
            coded += DEPTH // 2
        else:
            weights = part(coded, True, place, start, INPUTS, DEPTH).to(tl.float32).to(factors.dtype)
            coded += DEPTH
        if GROUPS == 1 and offsets is None:
            total = times(factors, weights, total, SWAPPED)
        else:
            scale = tl.load(scales + group)
            summed = times(factors, weights, tl.zeros_like(total), SWAPPED)
            total += summed * (scale[:, None] if SWAPPED else scale[None, :])
            if offsets is not None:
                offset = tl.load(offsets + group)
                row_sum = tl.sum(factors.to(tl.float32), 1)
                total += offset[:, None] * row_sum[None, :] if SWAPPED else row_sum[:, None] * offset[None, :]
        values += DEPTH
    if SWAPPED:
        total = tl.trans(total)
    if GROUPS == 1 and offsets is None:
        total *= tl.load(scales + held)[None, :]
    if bias is not None:
        total += tl.load(bias + held).to(tl.float32)[None, :]
    made = total.to(out.dtype.element_ty)
    tl.store(
        out + row.to(tl.int64)[:, None] * OUTPUTS + column[None, :], made, mask=there & (column < OUTPUTS)[None, :]
    )
