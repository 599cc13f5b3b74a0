"""Products of few rows with a weight [out, in], such as decodes are: they take as long as reading the weight does.

One row is multiplied without tensor cores: the weights go from memory to registers, many of them at once. More rows
are the second factor of the tensor cores' products, of which the weights are the first.

Bytes: out · in · itemsize, and n · (in + out) · itemsize of rows. FLOPs: 2 · n · out · in.

Tiles were chosen by measuring on an H200 (Triton 3.6, 2026-11-27), out of more than 100. µs of ours and of cuBLAS, with
Llama-3.1-8B's weights out of the caches, beside out · in · 2 bytes at the 4.28 TB/s of a copy:

    out × in       1 row          16 rows        copy
    6144 × 4096    13.7 / 16.5    14.5 / 15.9    11.8
    4096 × 4096     9.7 / 13.4    10.8 / 13.5     7.8
    28672 × 4096   54.1 / 59.3    56.9 / 59.8    54.9
    4096 × 14336   28.9 / 33.1    30.5 / 33.6    27.5

Weights are asked for before the kernel before has ended, and gates and ups are activated where they are multiplied,
which shows in whole layers (the same GPU, contexts of 1,024 tokens; µs as it was, with this, and at the copy's rate):

    Llama-3.1-8B, 1 row      121.2   117.4   102.9
    Llama-3.1-8B, 16 rows    146.6   143.5   117.6
    Qwen3-0.6B, 1 row         26.0    23.8     8.3
    Qwen3-0.6B, 16 rows       53.4    51.2    23.0
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.activation import limit_of
from services.worker.ops.gpu import HOPPER, generation
from services.worker.ops.interface import (
    Activation,
)
from services.worker.ops.triton.dependent_launch import LINE_BYTES, ask_for, launch_options, wait_for_inputs
from services.worker.ops.triton.products import part, times
from services.worker.ops.triton.row_ops import gated_of

MAX_ROWS = 16
"""Of more rows, cuBLAS's products are as fast."""
_MANY_OUTPUTS = 16384
"""From so many on there are several programs for each multiprocessor, however wide they are."""


class RowsTile(NamedTuple):
    """What one program multiplies at a time."""

    rows: int
    columns: int
    """Outputs."""
    depth: int
    """Inputs."""
    num_warps: int
    num_stages: int
    lines: int = 0
    """Of each output's weights: what a program of several rows asks for before the kernel before it has ended."""


def rows_tile(rows: int, outputs: int, inputs: int) -> RowsTile:
    """The tile of so many rows, `MAX_ROWS` at most."""
    deep = inputs >= 3 * outputs
    if rows == 1:
        return RowsTile(1, 1, 1024, num_warps=2, num_stages=3) if deep else RowsTile(1, 2, 1024, 4, 3)
    if outputs >= _MANY_OUTPUTS:
        return RowsTile(MAX_ROWS, 64, 64, num_warps=4, num_stages=3)
    if deep:
        return RowsTile(MAX_ROWS, 32, 256, num_warps=4, num_stages=6, lines=8)
    return RowsTile(MAX_ROWS, 64, 128, num_warps=4, num_stages=6, lines=8 if outputs > 4096 else 4)


def gated_tile(rows: int) -> RowsTile:
    """Of so many rows, where gates and ups are multiplied together: `columns` of each."""
    if rows == 1:
        return RowsTile(1, 1, 1024, num_warps=4, num_stages=3)
    return RowsTile(MAX_ROWS, 64, 128, num_warps=4, num_stages=3, lines=2)


def multiplies(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels do the product of x [n, in] with `weight` here, faster than cuBLAS: they were measured on
    Hopper, whose shared memory their tiles need."""
    return (
        len(x) <= MAX_ROWS
        and x.element_size() == 2
        and weight.dtype == x.dtype
        and weight.is_contiguous()
        and generation(x.device) == HOPPER
    )


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None, gated: Activation | None = None) -> Tensor:
    """x [n, in] @ weight [out, in].T + bias [out] → [n, out] in x's dtype, summed in float32, `bias` added before it is
    rounded. n: `MAX_ROWS` at most.

    `gated`: the outputs are gates, then ups, each rounded, and `row_ops.gated_act` of them → [n, out / 2].
    """
    x = x.contiguous()
    (rows, inputs), outputs = x.shape, len(weight) // (2 if gated else 1)
    out = x.new_empty(rows, outputs)
    tile = gated_tile(rows) if gated else rows_tile(rows, outputs, inputs)
    constants = {
        "INPUTS": inputs,
        "OUTPUTS": outputs,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "GATED": None if gated is None else limit_of(gated).name,
        "LIMIT": 0.0 if gated is None else limit_of(gated).limit,
        "num_warps": tile.num_warps,
        **launch_options(x.device),
    }
    grid = (triton.cdiv(outputs, tile.columns),)
    if rows == 1:
        one_row_kernel[grid](x, weight, bias, out, **constants)
    else:
        # Of weights shorter than that, the last ones' lines would lie behind them.
        lines = tile.lines if tile.lines * LINE_BYTES.value <= inputs * weight.element_size() else 0
        constants |= {"ROWS": tile.rows, "LINES": lines, "num_stages": tile.num_stages}
        few_rows_kernel[grid](x, weight, bias, out, rows, **constants)
    return out


UNROLLED = tl.constexpr(2)
"""Turns of the loop whose loads are on their way together."""


@triton.jit
def one_row_kernel(
    x,
    weight,
    bias,
    out,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Some outputs of the only row a program. `bias` may be None."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # Outputs beyond the last are computed as the last, and not stored.
    held = tl.minimum(column, OUTPUTS - 1)
    depth = tl.arange(0, DEPTH)
    weights = weight + held.to(tl.int64)[:, None] * INPUTS + depth[None, :]
    values = (x + depth)[None, :]
    # No kernel writes weights, so the first of them are on their way before the kernel before has ended.
    factors = part(weights, True, depth, 0, INPUTS, DEPTH)
    if GATED is not None:
        more = part(weights + OUTPUTS * INPUTS, True, depth, 0, INPUTS, DEPTH)
    wait_for_inputs(DEPENDENT)
    numbers = part(values, True, depth, 0, INPUTS, DEPTH).to(tl.float32)
    total = factors.to(tl.float32) * numbers
    if GATED is not None:
        ups = more.to(tl.float32) * numbers
    for start in tl.range(DEPTH, INPUTS, DEPTH, loop_unroll_factor=UNROLLED):
        numbers = part(values + start, True, depth, start, INPUTS, DEPTH).to(tl.float32)
        total += part(weights + start, True, depth, start, INPUTS, DEPTH).to(tl.float32) * numbers
        if GATED is not None:
            others = weights + OUTPUTS * INPUTS + start
            ups += part(others, True, depth, start, INPUTS, DEPTH).to(tl.float32) * numbers
    made = tl.sum(total, 1)
    if bias is not None:
        made += tl.load(bias + held).to(tl.float32)
    if GATED is not None:
        up = tl.sum(ups, 1)
        if bias is not None:
            up += tl.load(bias + OUTPUTS + held).to(tl.float32)
        made = gated_rounded(made, up, out.dtype.element_ty, GATED, LIMIT)
    tl.store(out + column, made.to(out.dtype.element_ty), mask=column < OUTPUTS)


@triton.jit(do_not_specialize=["rows"])
def few_rows_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    LINES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Some outputs of all rows a program. `bias` may be None."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    held = tl.minimum(column, OUTPUTS - 1)
    if LINES > 0:
        lines = tl.arange(0, LINES) * (LINE_BYTES // 2)
        firsts = weight + held.to(tl.int64)[:, None] * INPUTS + lines[None, :]
        ask_for(firsts, DEPENDENT)
        if GATED is not None:
            ask_for(firsts + OUTPUTS * INPUTS, DEPENDENT)
    wait_for_inputs(DEPENDENT)
    row, depth = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    there = (row < rows)[:, None]
    weights = weight + held.to(tl.int64)[:, None] * INPUTS + depth[None, :]
    values = x + row[:, None] * INPUTS + depth[None, :]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    ups = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in tl.range(0, INPUTS, DEPTH):
        factors = part(values, there, depth, start, INPUTS, DEPTH)
        total = times(factors, part(weights, True, depth, start, INPUTS, DEPTH), total, True)
        if GATED is not None:
            ups = times(factors, part(weights + OUTPUTS * INPUTS, True, depth, start, INPUTS, DEPTH), ups, True)
        weights += DEPTH
        values += DEPTH
    if bias is not None:
        total += tl.load(bias + held).to(tl.float32)[:, None]
    if GATED is not None:
        if bias is not None:
            ups += tl.load(bias + OUTPUTS + held).to(tl.float32)[:, None]
        total = gated_rounded(total, ups, out.dtype.element_ty, GATED, LIMIT)
    made = tl.trans(total).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * OUTPUTS + column[None, :], made, mask=there & (column < OUTPUTS)[None, :])


@triton.jit
def gated_rounded(gate, up, dtype: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr):
    """What `gated_act` makes of gates and ups that were rounded to `dtype` before."""
    return gated_of(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), dtype, KIND, LIMIT)
