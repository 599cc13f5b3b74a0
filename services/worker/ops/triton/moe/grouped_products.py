"""Many rows through their experts: grouped products of rows that are sorted by expert.

Each tile of rows gathers them, multiplies them with the gates and ups of one expert and activates; a second kernel
multiplies what came out with the expert's last matrix and the rows' chances; a third sums the picks of each row in
their order.

Bytes of n rows that meet m experts: 3 · m · I · hidden · itemsize of weights where the tiles of an expert meet in the
caches, and n · ((1 + 2 · chosen + 1) · hidden + 2 · chosen · I) · itemsize of rows. FLOPs: 6 · n · chosen · I · hidden.

Experts in int8 or fp8 whose rows are rounded to it, too (W8A8), are multiplied by the same kernels as they are; rows
are rounded before each of the two. Of other codes the kernels make numbers, a tile at a time (`codes`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.gpu import generation
from services.worker.ops.interface import Activation, Picks
from services.worker.ops.quantized import Code, ExpertBiases, nibble_run
from services.worker.ops.triton.codes import CodedStack, coded_inputs, coded_rows, group_terms, times_codes, typed_codes
from services.worker.ops.triton.dependent_launch import launch_options, wait_for_inputs
from services.worker.ops.triton.moe.routing import (
    ExpertTile,
    coded_tile,
    expert_tile,
    most_tiles,
    sort_picks,
    tile_rows,
)
from services.worker.ops.triton.products import part, times
from services.worker.ops.triton.row_ops import gated_sums, gating, of_outputs, round_rows

SUMMED_AT_ONCE = 1024
MAX_INT4_ROWS = 64
"""Rows of a tile of which numbers are made of four bits: with more, registers spill."""
NO_BIASES = ExpertBiases(None, None)


def mix_tiles(
    x: Tensor,
    picks: Picks,
    gate_up: Tensor | CodedStack,
    down: Tensor | CodedStack,
    biases: ExpertBiases = NO_BIASES,
    *,
    kind: Activation,
    most: int | None = None,
) -> Tensor:
    """Sorted by expert: an expert is read once for each tile of rows. `most`: rows of a tile; None: as many as pay.
    Where both stacks say so (`rounded_activations`), what they are multiplied with is rounded to their code, too: x and
    what is between."""
    first, second = _stored(gate_up), _stored(down)
    (rows, hidden), (experts, _, size), chosen = x.shape, down.shape, picks.experts.shape[1]
    tile = most or tile_rows(rows * chosen, experts)
    if "int4" in (first.code, second.code):
        tile = min(tile, MAX_INT4_ROWS)
    up, out = (_tile(each, x, tile, gated=gated) for each, gated in ((first, True), (second, False)))
    order = sort_picks(picks.experts, experts, up.rows)
    tiles, dependent = most_tiles(rows * chosen, experts, up.rows), launch_options(x.device)
    gated = x.new_empty(tiles * up.rows, size)
    up_tile_kernel[(tiles * triton.cdiv(size, up.columns),)](
        *(*_factors(x, first), *first.terms, biases.gate_up, *order, gated, rows * chosen),
        HIDDEN=hidden,
        SIZE=size,
        CHOSEN=chosen,
        **gating(kind),
        **_constants(first, hidden, up),
        **dependent,
    )
    parts = x.new_empty(rows * chosen, hidden)
    down_tile_kernel[(tiles * triton.cdiv(hidden, out.columns),)](
        *(*_factors(gated, second), *second.terms, biases.down, *order, picks.chances, parts, rows * chosen),
        HIDDEN=hidden,
        SIZE=size,
        **_constants(second, size, out),
        **dependent,
    )
    summed = torch.empty_like(x)
    sum_kernel[(rows, triton.cdiv(hidden, SUMMED_AT_ONCE))](
        *(parts, picks.experts, summed), HIDDEN=hidden, CHOSEN=chosen, AT_ONCE=SUMMED_AT_ONCE, num_warps=4, **dependent
    )
    return summed


class _Stored(NamedTuple):
    """A stack as kernels read it."""

    terms: tuple[Tensor | None, ...]
    """The matrices; scales, zero points and offsets."""
    code: Code | None
    """What numbers are made of in the kernel; None: they are multiplied as they are."""
    group: int
    rounded: Code | None
    """What rows are rounded to before."""


def _stored(stack: Tensor | CodedStack) -> _Stored:
    if isinstance(stack, Tensor):
        return _Stored((stack, None, None, None), None, 1, rounded=None)
    weight, terms = stack.weight, (typed_codes(stack.weight), *group_terms(stack.weight))
    if weight.rounded_activations:
        return _Stored(terms, None, stack.group, rounded=weight.code)
    return _Stored(terms, weight.code, stack.group, rounded=None)


def _factors(rows: Tensor, stack: _Stored) -> tuple[Tensor, Tensor | None]:
    """Rows as they are multiplied, and their scales."""
    return round_rows(rows, stack.rounded) if stack.rounded else (rows, None)


def _tile(stack: _Stored, x: Tensor, rows: int, *, gated: bool) -> ExpertTile:
    if stack.code is not None:
        return coded_tile(rows, x.element_size(), generation(x.device), stack.code, stack.group, gated=gated)
    return expert_tile(rows, 1 if stack.rounded else x.element_size(), generation(x.device), gated=gated)


def _constants(stack: _Stored, inputs: int, tile: ExpertTile) -> dict[str, Any]:
    return {
        "CODE": stack.code,
        "GROUP": stack.group,
        "RUN": nibble_run(inputs),
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "SWAPPED": tile.swapped,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


@triton.constexpr_function
def sums_dtype(factors):
    """Of products of such factors."""
    return tl.int32 if factors == tl.int8 else tl.float32


@triton.jit
def _tile_picks(tile, tile_experts, sorted_picks, picks, ROWS: tl.constexpr):
    """(expert, places among the sorted picks, picks, which of these there are [ROWS, 1]) of a tile. Of few rows most of
    a tile is padding: it counts as zeros that are not fetched."""
    place = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pick = tl.load(sorted_picks + place)
    return tl.load(tile_experts + tile).to(tl.int64), place, pick, (pick < picks)[:, None]


@triton.jit
def _outputs(
    sums,
    row_scales,
    scales,
    biases,
    expert,
    column,
    COLUMNS: tl.constexpr,
    output,
    CODE: tl.constexpr,
    GROUPED: tl.constexpr,
    SWAPPED: tl.constexpr,
):
    """A tile of sums with the scales that they lack yet, and with biases; either may be None. `column` of the expert's
    COLUMNS is `output` of all experts'."""
    if CODE is not None:
        if not GROUPED:
            sums *= along_columns(tl.load(scales + output), SWAPPED)
    elif scales is not None:
        sums = scaled(sums, row_scales, of_outputs(scales, expert, column, COLUMNS), SWAPPED)
    if biases is not None:
        sums += along_columns(of_outputs(biases, expert, column, COLUMNS), SWAPPED)
    return sums


@triton.jit(do_not_specialize=["picks"])
def up_tile_kernel(
    x,
    row_scales,
    gate_up,
    scales,
    zeros,
    offsets,
    biases,
    sorted_picks,
    tile_experts,
    tiles,
    gated,
    picks,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    CHOSEN: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SWAPPED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One tile of sorted picks times some columns of its expert a program: `gated` [tiles * ROWS, SIZE]."""
    wait_for_inputs(DEPENDENT)
    WIDE: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) // WIDE
    if tile >= tl.load(tiles):
        return
    expert, place, pick, there = _tile_picks(tile, tile_experts, sorted_picks, picks, ROWS)
    column = tl.program_id(0) % WIDE * COLUMNS + tl.arange(0, COLUMNS)
    held = tl.minimum(column, SIZE - 1)
    IN_BYTE: tl.constexpr = 2 if CODE == "int4" else 1
    byte, depth = coded_inputs(DEPTH, CODE, RUN)
    rows = x + (pick // CHOSEN).to(tl.int64)[:, None] * HIDDEN + depth[None, :]
    gates = gate_up + expert * (2 * SIZE * HIDDEN // IN_BYTE) + (held[:, None] * (HIDDEN // IN_BYTE) + byte[None, :])
    ups = gates + SIZE * HIDDEN // IN_BYTE
    output = expert * (2 * SIZE) + held
    GROUPED: tl.constexpr = CODE is not None and (GROUP < HIDDEN or offsets is not None)
    gate = tl.zeros([COLUMNS, ROWS] if SWAPPED else [ROWS, COLUMNS], sums_dtype(x.dtype.element_ty))
    up = tl.zeros([COLUMNS, ROWS] if SWAPPED else [ROWS, COLUMNS], sums_dtype(x.dtype.element_ty))
    for start in tl.range(0, HIDDEN, DEPTH):
        values, highs = coded_rows(rows, there, depth, start, HIDDEN, DEPTH, CODE, RUN)
        first = part(gates, True, byte, start // IN_BYTE, HIDDEN // IN_BYTE, DEPTH // IN_BYTE)
        second = part(ups, True, byte, start // IN_BYTE, HIDDEN // IN_BYTE, DEPTH // IN_BYTE)
        if CODE is None:
            gate = times(values, first, gate, SWAPPED)
            up = times(values, second, up, SWAPPED)
        else:
            group = output * (HIDDEN // GROUP) + start // GROUP
            gate = times_codes(values, highs, first, group, scales, zeros, offsets, gate, GROUPED, CODE, SWAPPED)
            group += SIZE * (HIDDEN // GROUP)
            up = times_codes(values, highs, second, group, scales, zeros, offsets, up, GROUPED, CODE, SWAPPED)
        rows += DEPTH
        gates += DEPTH // IN_BYTE
        ups += DEPTH // IN_BYTE
    of_rows = None
    if CODE is None and scales is not None:
        of_rows = tl.load(row_scales + pick // CHOSEN, mask=pick < picks, other=0.0)
    gate = _outputs(gate, of_rows, scales, biases, expert, column, 2 * SIZE, output, CODE, GROUPED, SWAPPED)
    column_up, output_up = column + SIZE, output + SIZE
    up = _outputs(up, of_rows, scales, biases, expert, column_up, 2 * SIZE, output_up, CODE, GROUPED, SWAPPED)
    made = gated_sums(gate, up, KIND, LIMIT).to(gated.dtype.element_ty)
    if SWAPPED:
        made = tl.trans(made)
    tl.store(gated + place[:, None] * SIZE + column[None, :], made, mask=there & (column < SIZE)[None, :])


@triton.jit(do_not_specialize=["picks"])
def down_tile_kernel(
    gated,
    row_scales,
    down,
    scales,
    zeros,
    offsets,
    biases,
    sorted_picks,
    tile_experts,
    tiles,
    chances,
    parts,
    picks,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SWAPPED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One tile of sorted picks times some columns of its expert a program: `parts` [picks, HIDDEN], times chances."""
    wait_for_inputs(DEPENDENT)
    WIDE: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0) // WIDE
    if tile >= tl.load(tiles):
        return
    expert, place, pick, there = _tile_picks(tile, tile_experts, sorted_picks, picks, ROWS)
    column = tl.program_id(0) % WIDE * COLUMNS + tl.arange(0, COLUMNS)
    held = tl.minimum(column, HIDDEN - 1)
    IN_BYTE: tl.constexpr = 2 if CODE == "int4" else 1
    byte, depth = coded_inputs(DEPTH, CODE, RUN)
    rows = gated + place[:, None] * SIZE + depth[None, :]
    weights = down + expert * (HIDDEN * SIZE // IN_BYTE) + (held[:, None] * (SIZE // IN_BYTE) + byte[None, :])
    output = expert * HIDDEN + held
    GROUPED: tl.constexpr = CODE is not None and (GROUP < SIZE or offsets is not None)
    total = tl.zeros([COLUMNS, ROWS] if SWAPPED else [ROWS, COLUMNS], sums_dtype(gated.dtype.element_ty))
    for start in tl.range(0, SIZE, DEPTH):
        values, highs = coded_rows(rows, there, depth, start, SIZE, DEPTH, CODE, RUN)
        read = part(weights, True, byte, start // IN_BYTE, SIZE // IN_BYTE, DEPTH // IN_BYTE)
        if CODE is None:
            total = times(values, read, total, SWAPPED)
        else:
            group = output * (SIZE // GROUP) + start // GROUP
            total = times_codes(values, highs, read, group, scales, zeros, offsets, total, GROUPED, CODE, SWAPPED)
        rows += DEPTH
        weights += DEPTH // IN_BYTE
    of_rows = None
    if CODE is None and scales is not None:
        of_rows = tl.load(row_scales + place)
    total = _outputs(total, of_rows, scales, biases, expert, column, HIDDEN, output, CODE, GROUPED, SWAPPED)
    if SWAPPED:
        total = tl.trans(total)
    chance = tl.load(chances + pick, mask=pick < picks, other=0.0)
    tl.store(
        parts + pick.to(tl.int64)[:, None] * HIDDEN + column[None, :],
        (total * chance[:, None]).to(parts.dtype.element_ty),
        mask=there & (column < HIDDEN)[None, :],
    )


@triton.jit
def along_columns(added, SWAPPED: tl.constexpr):
    """[COLUMNS] as it is added to a tile of sums."""
    if SWAPPED:
        shaped = added[:, None]
    else:
        shaped = added[None, :]
    return shaped


@triton.jit
def scaled(sums, row_scales, scales, SWAPPED: tl.constexpr):
    """A tile of sums of codes as float32. row_scales [ROWS], scales [COLUMNS]"""
    if SWAPPED:
        made = sums.to(tl.float32) * (scales[:, None] * row_scales[None, :])
    else:
        made = sums.to(tl.float32) * (row_scales[:, None] * scales[None, :])
    return made


@triton.jit
def sum_kernel(
    parts,
    experts,
    out,
    HIDDEN: tl.constexpr,
    CHOSEN: tl.constexpr,
    AT_ONCE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (rows, columns): the sum of a row's picks, in their order; nothing was written for those of other ranks."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    total = tl.zeros([AT_ONCE], tl.float32)
    for place in tl.static_range(CHOSEN):
        pick = row * CHOSEN + place
        held = tl.where(tl.load(experts + pick) >= 0, HIDDEN, 0)
        total += tl.load(parts + pick * HIDDEN + column, mask=column < held, other=0.0).to(tl.float32)
    tl.store(out + row * HIDDEN + column, total.to(out.dtype.element_ty), mask=column < HIDDEN)
