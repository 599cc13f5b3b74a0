"""Experts whose weights stay codes in memory: few rows read the codes of their own experts, for many rows a layer's
experts become numbers in one launch, and then go through the plain kernels (`mixture`).

Bytes of n rows that read codes: as those of `mixture`, of 1 byte or ½ for each weight and of scales beside. Numbers of
all E experts: 3 · E · I · hidden · (1 or ½ + itemsize).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.interface import Activation, Picks
from services.worker.ops.quantized import ExpertBiases, QuantizedStack, QuantizedWeight, WeightStack, pack_nibbles
from services.worker.ops.triton.moe.grouped_products import NO_BIASES
from services.worker.ops.triton.moe.mixture import turns_at_once
from services.worker.ops.triton.moe.routing import down_row_tile, up_row_tile
from services.worker.ops.triton.quantized_linear import group_terms, typed_codes
from services.worker.ops.triton.row_ops import gated_sums, of_outputs

_NUMBERS_AT_ONCE = 1024


class CodedStack(NamedTuple):
    """Matrices of one shape as codes, those of four bits two to a byte."""

    weight: QuantizedWeight
    """[matrices * out, in]"""
    shape: tuple[int, int, int]
    """[matrices, out, in]"""

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.shape[2] // self.weight.scales.shape[1]


def code_stack(stack: WeightStack) -> Tensor | CodedStack:
    """As the kernels read it."""
    if not isinstance(stack, QuantizedStack):
        return stack
    weight = stack.weight
    codes = pack_nibbles(weight.codes) if weight.code == "int4" else weight.codes
    return CodedStack(weight._replace(codes=codes), stack.shape)


def numbers_of(stack: Tensor | CodedStack, dtype: torch.dtype) -> Tensor:
    """[matrices, out, in] in `dtype`, by one launch."""
    if isinstance(stack, Tensor):
        return stack
    count, out, inputs = stack.shape
    numbers = torch.empty(stack.shape, dtype=dtype, device=stack.weight.codes.device)
    numbers_kernel[(count * out, triton.cdiv(inputs, _NUMBERS_AT_ONCE))](
        *(typed_codes(stack.weight), *group_terms(stack.weight), numbers),
        INPUTS=inputs,
        GROUP=stack.group,
        CODE=stack.weight.code,
        AT_ONCE=_NUMBERS_AT_ONCE,
        num_warps=4,
    )
    return numbers


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
    gated = x.new_empty(rows * chosen, size)
    tile = up_row_tile(x.element_size())
    coded_up_row_kernel[(triton.cdiv(size, tile.columns), rows * chosen)](
        *(x, typed_codes(gate_up.weight), *group_terms(gate_up.weight)),
        *(biases.gate_up, picks.experts, gated),
        HIDDEN=hidden,
        SIZE=size,
        CHOSEN=chosen,
        KIND=kind,
        GROUP=gate_up.group,
        CODE=gate_up.weight.code,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        num_warps=1,
    )
    out = torch.empty_like(x)
    tile = down_row_tile(x.element_size())
    coded_down_row_kernel[(triton.cdiv(hidden, tile.columns), rows)](
        *(gated, typed_codes(down.weight), *group_terms(down.weight)),
        *(biases.down, *picks, out),
        HIDDEN=hidden,
        SIZE=size,
        CHOSEN=chosen,
        GROUP=down.group,
        CODE=down.weight.code,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        num_warps=1,
    )
    return out


@triton.jit
def decoded(
    codes, scales, zeros, offsets, output, place, there, INPUTS: tl.constexpr, GROUP: tl.constexpr, CODE: tl.constexpr
):
    """float32 weights of `output` and input `place`, which are broadcast to one shape; zeros where not `there`."""
    group = output * (INPUTS // GROUP) + place // GROUP
    if CODE == "int4":
        pairs = tl.load(codes + output * (INPUTS // 2) + place // 2, mask=there, other=0)
        number = ((pairs >> ((place % 2) * 4).to(tl.uint8)) & 15).to(tl.float32)
        if zeros is None:
            number -= 8.0
        else:
            number -= tl.load(zeros + group, mask=there, other=0).to(tl.float32)
    else:
        number = tl.load(codes + output * INPUTS + place, mask=there, other=0.0).to(tl.float32)
    number *= tl.load(scales + group, mask=there, other=0.0)
    if offsets is not None:
        number += tl.load(offsets + group, mask=there, other=0.0)
    return number


@triton.jit
def numbers_kernel(
    codes,
    scales,
    zeros,
    offsets,
    numbers,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Grid (outputs of all matrices, inputs)."""
    output = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    there = place < INPUTS
    made = decoded(codes, scales, zeros, offsets, output, place, there, INPUTS, GROUP, CODE)
    tl.store(numbers + output * INPUTS + place, made.to(numbers.dtype.element_ty), mask=there)


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
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """As `mixture.up_row_kernel`."""
    TURNS: tl.constexpr = turns_at_once(HIDDEN, DEPTH)
    ROUNDED: tl.constexpr = (HIDDEN + TURNS * DEPTH - 1) // (TURNS * DEPTH) * (TURNS * DEPTH)
    pick = tl.program_id(1)
    expert = tl.load(experts + pick).to(tl.int64)
    if expert < 0:
        return
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    row = x + (pick // CHOSEN).to(tl.int64) * HIDDEN + depth
    output = expert * (2 * SIZE) + tl.minimum(column, SIZE - 1)[:, None]
    gate = tl.zeros([COLUMNS, DEPTH], tl.float32)
    up = tl.zeros([COLUMNS, DEPTH], tl.float32)
    for start in tl.range(0, ROUNDED, DEPTH, loop_unroll_factor=TURNS):
        place = start + depth[None, :]
        there = place < HIDDEN
        values = tl.load(row + start, mask=depth < HIDDEN - start, other=0.0).to(tl.float32)[None, :]
        gate += decoded(codes, scales, zeros, offsets, output, place, there, HIDDEN, GROUP, CODE) * values
        up += decoded(codes, scales, zeros, offsets, output + SIZE, place, there, HIDDEN, GROUP, CODE) * values
    gates_sum, ups_sum = tl.sum(gate, 1), tl.sum(up, 1)
    if biases is not None:
        gates_sum += of_outputs(biases, expert, column, 2 * SIZE)
        ups_sum += of_outputs(biases, expert, column + SIZE, 2 * SIZE)
    made = gated_sums(gates_sum, ups_sum, KIND)
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
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """As `mixture.down_row_kernel`."""
    TURNS: tl.constexpr = turns_at_once(SIZE, DEPTH)
    ROUNDED: tl.constexpr = (SIZE + TURNS * DEPTH - 1) // (TURNS * DEPTH) * (TURNS * DEPTH)
    row = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    held = tl.minimum(column, HIDDEN - 1)[:, None]
    total = tl.zeros([COLUMNS, DEPTH], tl.float32)
    added = tl.zeros([COLUMNS], tl.float32)
    for number in tl.static_range(CHOSEN):
        pick = row * CHOSEN + number
        expert = tl.load(experts + pick).to(tl.int64)
        if expert >= 0:  # else another rank's
            chance = tl.load(chances + pick)
            output = expert * HIDDEN + held
            if biases is not None:
                added += of_outputs(biases, expert, column, HIDDEN) * chance
            inputs = gated + pick.to(tl.int64) * SIZE + depth
            for start in tl.range(0, ROUNDED, DEPTH, loop_unroll_factor=TURNS):
                place = start + depth[None, :]
                values = tl.load(inputs + start, mask=depth < SIZE - start, other=0.0).to(tl.float32) * chance
                weights = decoded(codes, scales, zeros, offsets, output, place, place < SIZE, SIZE, GROUP, CODE)
                total += weights * values[None, :]
    made = tl.sum(total, 1) + added
    tl.store(out + row.to(tl.int64) * HIDDEN + column, made.to(out.dtype.element_ty), mask=column < HIDDEN)
