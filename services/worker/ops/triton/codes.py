"""What codes stand for: of a tile of them, within kernels that multiply it, and of a whole weight, in one launch.

Bytes of `numbers`: out · in · (1, or ½ of int4) of codes, out · groups · 4 of scales (and · 1 of zero points, · 4 of
offsets), and out · in · itemsize, which are written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.quantized import QuantizedStack, QuantizedWeight, WeightStack, nibble_run, pack_nibbles
from services.worker.ops.triton.dependent_launch import launch_options, wait_for_inputs
from services.worker.ops.triton.products import INTERPRETED, part, times

_WIDE = 1024
"""Inputs that a program makes at a time, at most."""
_AT_ONCE = 4096
"""Codes of a program."""


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


def packed_inputs(weight: QuantizedWeight) -> int:
    """Inputs of a weight whose codes of four bits are two to a byte."""
    return weight.codes.shape[1] * (2 if weight.code == "int4" else 1)


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
    codes = pack_nibbles(weight.codes, nibble_run(stack.shape[2])) if weight.code == "int4" else weight.codes
    return CodedStack(weight._replace(codes=codes), stack.shape)


def numbers(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """[out, in] in `dtype`, of codes that are packed; each is rounded once."""
    inputs = packed_inputs(weight)
    outputs, groups = weight.scales.shape
    made = torch.empty(outputs, inputs, dtype=dtype, device=weight.codes.device)
    width, lines = inputs // groups, outputs * groups
    wide = min(_WIDE, triton.next_power_of_2(width))
    at_once = _AT_ONCE // wide
    numbers_kernel[(triton.cdiv(lines, at_once), triton.cdiv(width, wide))](
        *(typed_codes(weight), *group_terms(weight), made, lines),
        WIDTH=width,
        CODE=weight.code,
        RUN=nibble_run(inputs),
        LINES=at_once,
        WIDE=wide,
        num_warps=4,
        **launch_options(made.device),
    )
    return made


def numbers_of(stack: Tensor | CodedStack, dtype: torch.dtype) -> Tensor:
    """[matrices, out, in] in `dtype`, by one launch."""
    if isinstance(stack, Tensor):
        return stack
    return numbers(stack.weight, dtype).view(stack.shape)


@triton.jit(do_not_specialize=["lines"])
def numbers_kernel(
    codes,
    scales,
    zeros,
    offsets,
    numbers,
    lines,
    WIDTH: tl.constexpr,
    CODE: tl.constexpr,
    RUN: tl.constexpr,
    LINES: tl.constexpr,
    WIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (lines, parts of them): a line are the inputs of an output that share a scale. `zeros` and `offsets` may be
    None."""
    wait_for_inputs(DEPENDENT)
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    first = tl.program_id(1) * WIDE
    held = tl.minimum(line, lines - 1)
    scale = tl.load(scales + held)[:, None]
    offset = None
    if offsets is not None:
        offset = tl.load(offsets + held)[:, None]
    if CODE == "int4":
        place = tl.arange(0, WIDE // 2)
        inside = (line < lines)[:, None] & (first // 2 + place < WIDTH // 2)[None, :]
        pairs = tl.load(codes + line[:, None] * (WIDTH // 2) + (first // 2 + place)[None, :], mask=inside, other=0)
        low, high = nibbles(pairs, zero_points(zeros, held), numbers.dtype.element_ty)
        to = numbers + line[:, None] * WIDTH + (first + low_input(place, RUN))[None, :]
        tl.store(to, _rounded(low, scale, offset, numbers.dtype.element_ty), mask=inside)
        tl.store(to + RUN, _rounded(high, scale, offset, numbers.dtype.element_ty), mask=inside)
    else:
        place = first + tl.arange(0, WIDE)
        inside = (line < lines)[:, None] & (place < WIDTH)[None, :]
        code = tl.load(codes + line[:, None] * WIDTH + place[None, :], mask=inside, other=0.0)
        to = numbers + line[:, None] * WIDTH + place[None, :]
        tl.store(to, _rounded(code, scale, offset, numbers.dtype.element_ty), mask=inside)


@triton.jit
def _rounded(code, scale, offset, dtype: tl.constexpr):
    number = code.to(tl.float32) * scale
    if offset is not None:
        number += offset
    return number.to(dtype)


@triton.jit
def low_input(place, RUN: tl.constexpr):
    """The input of the low bits of byte `place`; that of its high bits is RUN behind it."""
    return place // RUN * (2 * RUN) + place % RUN


@triton.jit
def zero_points(zeros, group):
    """[groups, 1] of int8."""
    if zeros is None:
        found = tl.full([group.shape[0], 1], 8, tl.int8)
    else:
        found = tl.load(zeros + group).to(tl.int8)[:, None]
    return found


@triton.jit
def nibbles(pairs, zero, dtype: tl.constexpr):
    """(numbers of the low bits, of the high bits) of `pairs` [n, m], in `dtype` or, where no product is in it, in
    float32; zero: [n, 1] of int8."""
    if dtype == tl.bfloat16 and not INTERPRETED:
        # 128 has seven digits behind its first: a whole number in place of the last of them is added to it. So two
        # become numbers at a time, instead of one by each conversion.
        less = (-128 - zero.to(tl.int16)).to(tl.float32).to(tl.bfloat16)
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 first, second, one;
            mov.b32 one, 0x3F803F80;
            prmt.b32 first, $4, 0, 0x4140;
            prmt.b32 second, $4, 0, 0x4342;
            lop3.b32 $0, first, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 $1, second, 0x000F000F, 0x43004300, 0xEA;
            shr.u32 first, first, 4;
            shr.u32 second, second, 4;
            lop3.b32 $2, first, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 $3, second, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, $0, one, $5;
            fma.rn.bf16x2 $1, $1, one, $6;
            fma.rn.bf16x2 $2, $2, one, $5;
            fma.rn.bf16x2 $3, $3, one, $6;
            }
            """,
            "=&r,=&r,=&r,=&r,r,r,r",
            [pairs, less],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low = ((pairs & 15).to(tl.int8) - zero).to(tl.float32).to(dtype)
        high = ((pairs >> 4).to(tl.int8) - zero).to(tl.float32).to(dtype)
    return low, high


@triton.jit
def coded_inputs(DEPTH: tl.constexpr, CODE: tl.constexpr, RUN: tl.constexpr):
    """(bytes of a tile's codes in a row, the input that each has, int4: in its low bits), of DEPTH inputs."""
    IN_BYTE: tl.constexpr = 2 if CODE == "int4" else 1
    byte = tl.arange(0, DEPTH // IN_BYTE)
    depth = byte
    if CODE == "int4":
        depth = low_input(byte, RUN)
    return byte, depth


@triton.jit
def coded_rows(
    rows, there, depth, start, INPUTS: tl.constexpr, DEPTH: tl.constexpr, CODE: tl.constexpr, RUN: tl.constexpr
):
    """(factors of the codes' numbers, int4: of those of low bits; of those of high bits) of a tile of rows."""
    values = part(rows, there, depth, start, INPUTS, DEPTH)
    highs = values
    if CODE == "int4":
        highs = part(rows + RUN, there, depth + RUN, start, INPUTS, DEPTH)
    return values, highs


@triton.jit
def times_codes(
    values,
    highs,
    codes,
    group,
    scales,
    zeros,
    offsets,
    total,
    GROUPED: tl.constexpr,
    CODE: tl.constexpr,
    SWAPPED: tl.constexpr,
):
    """total + values @ numbersᵀ, or that transposed, of inputs of one group; not yet scaled where not GROUPED. values
    [rows, inputs] of codes [columns, inputs]; of int4 those of low bits, and `highs` those of high ones."""
    summed = tl.zeros_like(total) if GROUPED else total
    if CODE == "int4":
        low, high = nibbles(codes, zero_points(zeros, group), values.dtype)
        summed = times(values, low, summed, SWAPPED)
        summed = times(highs, high, summed, SWAPPED)
    else:
        summed = times(values, codes.to(tl.float32).to(values.dtype), summed, SWAPPED)
    if GROUPED:
        scale = tl.load(scales + group)
        summed = total + summed * (scale[:, None] if SWAPPED else scale[None, :])
        if offsets is not None:
            offset = tl.load(offsets + group)
            row_sum = tl.sum(values.to(tl.float32), 1)
            if CODE == "int4":
                row_sum += tl.sum(highs.to(tl.float32), 1)
            summed += offset[:, None] * row_sum[None, :] if SWAPPED else row_sum[:, None] * offset[None, :]
    return summed


@triton.jit
def coded_row_sums(
    row,
    codes,
    scales,
    zeros,
    offsets,
    output,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    RUN: tl.constexpr,
    DEPTH: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """A row's products with the weights of each `output` [n], int64, without tensor cores: float32 [n]. A tile has a
    line for each group of DEPTH inputs of each output, so that a scale is loaded once for a line. UNROLL: how many
    iterations of the loop load together."""
    GROUPS: tl.constexpr = INPUTS // GROUP
    SCALED_LAST: tl.constexpr = GROUPS == 1 and offsets is None
    WIDE: tl.constexpr = DEPTH if GROUPS == 1 else GROUP
    LINES: tl.constexpr = DEPTH // WIDE
    IN_BYTE: tl.constexpr = 2 if CODE == "int4" else 1
    COLUMNS: tl.constexpr = output.shape[0]
    place, depth = coded_inputs(WIDE, CODE, RUN)
    of_line = tl.reshape(tl.broadcast_to(output[:, None], [COLUMNS, LINES]), [COLUMNS * LINES])
    group_of = tl.reshape(tl.broadcast_to(tl.arange(0, LINES)[None, :], [COLUMNS, LINES]), [COLUMNS * LINES])
    first = (group_of * WIDE)[:, None]
    coded = codes + of_line[:, None] * (INPUTS // IN_BYTE) + first // IN_BYTE + place[None, :]
    values = row + first + depth[None, :]
    total = tl.zeros([COLUMNS * LINES, WIDE // IN_BYTE], tl.float32)
    for start in tl.range(0, INPUTS, DEPTH, loop_unroll_factor=UNROLL):
        inside = (first + depth[None, :]) < INPUTS - start
        if INPUTS % DEPTH == 0:
            inside = tl.full([COLUMNS * LINES, WIDE // IN_BYTE], True, tl.int1)
        group = of_line * GROUPS + tl.minimum(group_of + start // GROUP, GROUPS - 1)
        code = tl.load(coded + start // IN_BYTE, mask=inside, other=0.0)
        value = tl.load(values + start, mask=inside, other=0.0).to(tl.float32)
        factors = value
        if CODE == "int4":
            low, high = nibbles(code, zero_points(zeros, group), row.dtype.element_ty)
            above = tl.load(values + start + RUN, mask=inside, other=0.0).to(tl.float32)
            summed = low.to(tl.float32) * value + high.to(tl.float32) * above
            factors += above
        else:
            summed = code.to(tl.float32) * value
        if not SCALED_LAST:
            summed *= tl.load(scales + group)[:, None]
        if offsets is not None:
            summed += tl.load(offsets + group)[:, None] * factors
        total += summed
    sums = tl.sum(tl.reshape(tl.sum(total, 1), [COLUMNS, LINES]), 1)
    if SCALED_LAST:
        sums *= tl.load(scales + output)
    return sums
