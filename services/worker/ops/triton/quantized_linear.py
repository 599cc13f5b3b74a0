"""Products of rows with weights that stay codes in memory (W8A16, W4A16): numbers are made of a tile of codes on its
way to the tensor cores.

Codes stand for whole numbers or float8's, which bfloat16 and float16 have exactly; scales are applied to sums in
float32, of a group of inputs or of all. So a product is that of the rounded weights within the rounding of its sums.

Bytes of n rows: out · in · (1, or ½ of int4) of codes, out · groups · 4 of scales (and · 1 of zero points, · 4 of
offsets), and n · (in + out) · itemsize. FLOPs: 2 · n · out · in.

Tiles were chosen by measuring on an H200 (Triton 3.6, 2026-11-27), out of 15 to 30 for each code and number of rows. It
is not memory that they wait for, but the making of numbers, a turn of a loop after the other: hence many programs. µs
with Llama-3.1-8B's weights out of the caches (int4 with groups of 128 and zero points), beside bfloat16's:

    out × in       1 row: bf16, int8, fp8, int4    16 rows                      64 rows
    6144 × 4096    13.9  10.7   9.7  11.0          15.3  13.9  13.1  13.2       16.5  20.7  16.8  25.1
    4096 × 4096     9.9   8.0   7.9   7.8          10.7   9.4   9.2  10.8       11.2  15.6  13.5  17.1
    28672 × 4096   54.4  39.3  37.1  44.6          57.5  37.5  38.1  51.3       62.7  65.1  53.7  74.5
    4096 × 14336   29.3  22.0  22.1  21.8          30.5  26.4  25.7  31.6       35.7  35.0  28.6  44.7
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.gpu import HOPPER, generation
from services.worker.ops.quantized import Code, QuantizedWeight, nibble_run
from services.worker.ops.triton.codes import (
    coded_inputs,
    coded_row_sums,
    coded_rows,
    group_terms,
    packed_inputs,
    times_codes,
    typed_codes,
)
from services.worker.ops.triton.dependent_launch import launch_options, wait_for_inputs
from services.worker.ops.triton.products import part
from services.worker.ops.triton.splits import split_inputs, split_sums, splits_of, store_split, sum_splits

TILE_ROWS = (16, 64)
"""Rows of a tile: where there are no more, and where there are. One row alone is multiplied without tensor cores."""
MAX_ROWS = 64
"""Of more rows, a product of numbers that are made first costs less: each code is read once then, too."""
_MANY_OUTPUTS = 16384
"""From so many on there are several programs for each multiprocessor, however wide they are."""
_MULTIPROCESSORS = 132
"""Of an H100 and an H200."""
_SMALLEST_GROUP = 32
"""Inputs that a tile has at least, all of one group: a tensor core takes 16, and two of int4 lie in a byte."""
_FP8_GENERATION = 89
"""Compute capability from which float8 becomes other numbers by an instruction."""


class CodeTile(NamedTuple):
    """The tile of a product of some rows with some outputs."""

    rows: int
    columns: int
    depth: int
    """Inputs that are summed at a time; of one group."""
    swapped: bool
    """The weights are the product's first factor: a tensor core wants 64 rows of that, and few of the second, and takes
    it from registers, where numbers are made."""
    num_warps: int
    num_stages: int
    splits: int = 1
    """Programs that share a tile, each of which sums a part of the inputs."""


class CodeRowTile(NamedTuple):
    """What a program multiplies with one row at a time."""

    columns: int
    depth: int
    """Inputs; whole groups, where there are groups."""
    unroll: int
    """How many iterations of the loop load together."""
    num_warps: int


class CodedProduct(NamedTuple):
    """What a kernel is compiled for."""

    code: Code
    inputs: int
    outputs: int
    group: int
    """Inputs that share a scale."""

    @property
    def constants(self) -> dict[str, Any]:
        """For the kernels."""
        names = {"INPUTS": self.inputs, "OUTPUTS": self.outputs, "GROUP": self.group, "CODE": self.code}
        return names | {"RUN": nibble_run(self.inputs)}


def product_of(weight: QuantizedWeight) -> CodedProduct:
    """That of packed codes."""
    outputs, groups = weight.scales.shape
    inputs = packed_inputs(weight)
    return CodedProduct(weight.code, inputs, outputs, inputs // groups)


@cache
def code_tile(rows: int, itemsize: int, generation: int, product: CodedProduct) -> CodeTile:
    """The tile of at most `rows` rows of elements of `itemsize` bytes. Those of two bytes on Hopper were measured on an
    H200; others were chosen from what the compiler makes of them and by counting."""
    most = product.group if product.group % 32 == 0 else 32
    most = 1 << (most.bit_length() - 1)
    if itemsize == 4 or generation < HOPPER:
        depth = min(32 if itemsize == 4 else 128 if rows <= 16 else 64, most)
        if rows <= 16:
            return CodeTile(16, 64 if generation >= HOPPER else 32, depth, True, num_warps=4, num_stages=3)
        return CodeTile(64, 64, depth, False, num_warps=4, num_stages=3)
    if rows <= 16:
        if product.code == "int4":
            columns, splits = (128, 2) if product.outputs >= _MANY_OUTPUTS else (64, 4)
            return CodeTile(16, columns, min(128, most), True, num_warps=4, num_stages=4, splits=splits)
        if product.group < product.inputs:
            splits = splits_of(triton.cdiv(product.outputs, 64), 2 * _MULTIPROCESSORS)
            return CodeTile(
                16, 64, min(128, most), True, num_warps=4, num_stages=3 if splits == 1 else 4, splits=splits
            )
        if product.outputs >= _MANY_OUTPUTS:
            return CodeTile(16, 32, min(128, most), True, num_warps=2, num_stages=8)
        return CodeTile(16, 32, min(256, most), True, num_warps=4, num_stages=5)
    if product.outputs >= _MANY_OUTPUTS:
        columns = 128 if product.code == "int4" else 64
        return CodeTile(64, columns, min(128, most), True, num_warps=4, num_stages=4)
    splits = splits_of(triton.cdiv(product.outputs, 128), _MULTIPROCESSORS)
    return CodeTile(64, 128, min(128, most), True, num_warps=8, num_stages=3, splits=splits)


@cache
def code_row_tile(product: CodedProduct, *, zeros: bool = False) -> CodeRowTile:
    """The tile of one row. `zeros`: groups have zero points."""
    depth = min(2048 if zeros else 1024, triton.next_power_of_2(product.inputs))
    depth = depth if product.group == product.inputs else max(depth, product.group)
    if product.code == "int4":
        return CodeRowTile(2, depth, 2, num_warps=2) if zeros else CodeRowTile(4, depth, 2, num_warps=4)
    return CodeRowTile(2, depth, 4, num_warps=2)


def multiplies(x: Tensor, weight: QuantizedWeight) -> bool:
    """Whether the kernels do the product of `x` with packed `weight` here, and as fast as any other way."""
    return len(x) <= MAX_ROWS and readable(weight.code, x.device)


def tiles_hold_groups(weight: QuantizedWeight) -> bool:
    """Whether each tile's inputs have one scale."""
    return weight.scales.shape[1] == 1 or weight.group_size >= _SMALLEST_GROUP


def readable(code: Code, device: torch.device) -> bool:
    """Whether kernels read such codes there."""
    return code != "fp8" or knows_fp8(device)


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
    out = x.new_empty(len(x), len(weight.scales))
    if len(x) == 1:
        _launch_row(x, weight, bias, out)
    else:
        _launch(next(rows for rows in TILE_ROWS if len(x) <= rows), x, weight, bias, out)
    return out


def compile_tiles(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> None:
    """Runs the kernels on `x` [1, in] in all sizes of tiles: what is compiled now holds nobody up later."""
    out = x.new_empty(1, len(weight.scales))
    _launch_row(x, weight, bias, out)
    for rows in TILE_ROWS:
        _launch(rows, x, weight, bias, out)


def _launch_row(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor) -> None:
    product = product_of(weight)
    tile = code_row_tile(product, zeros=weight.zeros is not None)
    coded_row_kernel[(triton.cdiv(product.outputs, tile.columns),)](
        *(x, typed_codes(weight), *group_terms(weight), bias, out),
        **product.constants,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        UNROLL=tile.unroll,
        num_warps=tile.num_warps,
        **launch_options(x.device),
    )


def _launch(tile_rows: int, x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor) -> None:
    product = product_of(weight)
    tile = code_tile(tile_rows, x.element_size(), generation(x.device), product)
    tiles = triton.cdiv(product.outputs, tile.columns) * triton.cdiv(len(x), tile.rows)
    coded_linear_kernel[(tiles, tile.splits)](
        *(x, typed_codes(weight), *group_terms(weight), bias, out),
        *(*split_sums(out, tile.splits, torch.float32), len(x)),
        **product.constants,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        SPLITS=tile.splits,
        SWAPPED=tile.swapped,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch_options(x.device),
    )


@triton.jit
def coded_row_kernel(
    x,
    codes,
    scales,
    zeros,
    offsets,
    bias,
    out,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    RUN: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UNROLL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Some outputs of the only row a program. `zeros`, `offsets` and `bias` may be None."""
    wait_for_inputs(DEPENDENT)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # Outputs beyond the last are computed as the last, and not stored.
    held = tl.minimum(column, OUTPUTS - 1)
    made = coded_row_sums(x, codes, scales, zeros, offsets, held.to(tl.int64), INPUTS, GROUP, CODE, RUN, DEPTH, UNROLL)
    if bias is not None:
        made += tl.load(bias + held).to(tl.float32)
    tl.store(out + column, made.to(out.dtype.element_ty), mask=column < OUTPUTS)


@triton.jit(do_not_specialize=["rows"])
def coded_linear_kernel(
    x,
    codes,
    scales,
    zeros,
    offsets,
    bias,
    out,
    sums,
    arrived,
    rows,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    SWAPPED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (tiles of rows and outputs, splits of the inputs); those that read the same weights run beside each other.
    `zeros`, `offsets` and `bias` may be None."""
    wait_for_inputs(DEPENDENT)
    GROUPS: tl.constexpr = INPUTS // GROUP
    GROUPED: tl.constexpr = GROUPS > 1 or offsets is not None
    IN_BYTE: tl.constexpr = 2 if CODE == "int4" else 1
    tall = tl.cdiv(rows, ROWS)
    row = tl.program_id(0) % tall * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) // tall * COLUMNS + tl.arange(0, COLUMNS)
    there = (row < rows)[:, None]
    # Outputs beyond the last are read as the last, and not stored.
    held = tl.minimum(column, OUTPUTS - 1)
    first, end = split_inputs(INPUTS, DEPTH, SPLITS)
    place, depth = coded_inputs(DEPTH, CODE, RUN)
    coded = codes + held.to(tl.int64)[:, None] * (INPUTS // IN_BYTE) + (first // IN_BYTE + place)[None, :]
    values = x + row.to(tl.int64)[:, None] * INPUTS + (first + depth)[None, :]
    total = tl.zeros([COLUMNS, ROWS] if SWAPPED else [ROWS, COLUMNS], tl.float32)
    for start in tl.range(first, end, DEPTH):
        factors, highs = coded_rows(values, there, depth, start, INPUTS, DEPTH, CODE, RUN)
        code = part(coded, True, place, start // IN_BYTE, INPUTS // IN_BYTE, DEPTH // IN_BYTE)
        group = held * GROUPS + start // GROUP
        total = times_codes(factors, highs, code, group, scales, zeros, offsets, total, GROUPED, CODE, SWAPPED)
        values += DEPTH
        coded += DEPTH // IN_BYTE
    if SWAPPED:
        total = tl.trans(total)
    to = row.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
    inside = there & (column < OUTPUTS)[None, :]
    if SPLITS > 1:
        if not store_split(total, sums + to, arrived, inside, rows.to(tl.int64) * OUTPUTS, SPLITS):
            return
        total = sum_splits(sums + to, inside, rows.to(tl.int64) * OUTPUTS, SPLITS, total)
    if not GROUPED:
        total *= tl.load(scales + held)[None, :]
    if bias is not None:
        total += tl.load(bias + held).to(tl.float32)[None, :]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=inside)
