"""Few rows through experts whose weights stay codes in memory: each row reads the codes of its own experts. (More are
sorted by expert, as in `grouped_products`.)

Bytes of n rows: as those of `mixture`, of 1 byte or ½ for each weight and of scales beside.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.interface import Activation, Picks
from services.worker.ops.quantized import ExpertBiases, nibble_run
from services.worker.ops.triton.codes import CodedStack, coded_row_sums, group_terms, typed_codes
from services.worker.ops.triton.dependent_launch import launch_options, wait_for_inputs
from services.worker.ops.triton.moe.grouped_products import NO_BIASES
from services.worker.ops.triton.moe.mixture import unroll_factor
from services.worker.ops.triton.row_ops import gated_sums, gating, of_outputs


class CodedRowTile(NamedTuple):
    """The tile of a row times some columns of its own expert, without tensor cores."""

    columns: int
    depth: int
    num_warps: int


def coded_row_tile(inputs: int, group: int) -> CodedRowTile:
    """Of `inputs`, `group` of which share a scale. A turn is of whole groups."""
    few = min(1024 if inputs > 1024 else 256, triton.next_power_of_2(inputs))
    return CodedRowTile(1, few if group == inputs else max(few, group), num_warps=1)


def mix_coded_rows(
    x: Tensor,
    picks: Picks,
    gate_up: CodedStack,
    down: CodedStack,
    biases: ExpertBiases = NO_BIASES,
    *,
    kind: Activation,
) -> Tensor:
    """As `mixture.mix_rows`."""
    (rows, hidden), chosen, size = x.shape, picks.experts.shape[1], down.shape[2]
    gated, out, options = x.new_empty(rows * chosen, size), torch.empty_like(x), launch_options(x.device)
    tile = coded_row_tile(hidden, gate_up.group)
    coded_up_row_kernel[(triton.cdiv(size, tile.columns), rows * chosen)](
        *(x, typed_codes(gate_up.weight), *group_terms(gate_up.weight)),
        *(biases.gate_up, picks.experts, gated),
        HIDDEN=hidden,
        SIZE=size,
        CHOSEN=chosen,
        **gating(kind),
        GROUP=gate_up.group,
        CODE=gate_up.weight.code,
        RUN=nibble_run(hidden),
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        num_warps=tile.num_warps,
        **options,
    )
    tile = coded_row_tile(size, down.group)
    coded_down_row_kernel[(triton.cdiv(hidden, tile.columns), rows)](
        *(gated, typed_codes(down.weight), *group_terms(down.weight)),
        *(biases.down, *picks, out),
        HIDDEN=hidden,
        SIZE=size,
        CHOSEN=chosen,
        GROUP=down.group,
        CODE=down.weight.code,
        RUN=nibble_run(size),
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        num_warps=tile.num_warps,
        **options,
    )
    return out


@triton.jit
def coded_up_row_kernel(
    x,
    codes,
    scales,
    zeros,
    offsets,
    biases,
    experts,
    gated,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    CHOSEN: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    RUN: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """As `mixture.up_row_kernel`."""
    wait_for_inputs(DEPENDENT)
    pick = tl.program_id(1)
    expert = tl.load(experts + pick).to(tl.int64)
    if expert < 0:
        return
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = x + (pick // CHOSEN).to(tl.int64) * HIDDEN
    output = expert * (2 * SIZE) + tl.minimum(column, SIZE - 1)
    UNROLL: tl.constexpr = unroll_factor(HIDDEN, DEPTH)
    gate = coded_row_sums(row, codes, scales, zeros, offsets, output, HIDDEN, GROUP, CODE, RUN, DEPTH, UNROLL)
    up = coded_row_sums(row, codes, scales, zeros, offsets, output + SIZE, HIDDEN, GROUP, CODE, RUN, DEPTH, UNROLL)
    if biases is not None:
        gate += of_outputs(biases, expert, column, 2 * SIZE)
        up += of_outputs(biases, expert, column + SIZE, 2 * SIZE)
    made = gated_sums(gate, up, KIND, LIMIT)
    tl.store(gated + pick.to(tl.int64) * SIZE + column, made.to(gated.dtype.element_ty), mask=column < SIZE)


@triton.jit
def coded_down_row_kernel(
    gated,
    codes,
    scales,
    zeros,
    offsets,
    biases,
    chances,
    experts,
    out,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    CHOSEN: tl.constexpr,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    RUN: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """As `mixture.down_row_kernel`."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    held = tl.minimum(column, HIDDEN - 1)
    UNROLL: tl.constexpr = unroll_factor(SIZE, DEPTH)
    total = tl.zeros([COLUMNS], tl.float32)
    for number in tl.static_range(CHOSEN):
        pick = row * CHOSEN + number
        expert = tl.load(experts + pick).to(tl.int64)
        if expert >= 0:  # else another rank's
            line, output = gated + pick.to(tl.int64) * SIZE, expert * HIDDEN + held
            made = coded_row_sums(line, codes, scales, zeros, offsets, output, SIZE, GROUP, CODE, RUN, DEPTH, UNROLL)
            if biases is not None:
                made += of_outputs(biases, expert, column, HIDDEN)
            total += made * tl.load(chances + pick)
    tl.store(out + row.to(tl.int64) * HIDDEN + column, total.to(out.dtype.element_ty), mask=column < HIDDEN)
