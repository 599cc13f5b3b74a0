"""Many rows through their experts: grouped products of rows that are sorted by expert.

Each tile of rows gathers them, multiplies them with the gates and ups of one expert and activates; a second kernel
multiplies what came out with the expert's last matrix and the rows' chances; a third sums the picks of each row in
their order.

Bytes of n rows that meet m experts: 3 · m · I · hidden · itemsize of weights where the tiles of an expert meet in the
caches, and n · ((1 + 2 · chosen + 1) · hidden + 2 · chosen · I) · itemsize of rows. FLOPs: 6 · n · chosen · I · hidden.

Experts in int8 whose rows are rounded to it, too (W8A8), are multiplied by the same kernels in whole numbers; rows are
rounded before each of the two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.gpu import generation
from services.worker.ops.interface import Activation, Picks
from services.worker.ops.quantized import ExpertBiases
from services.worker.ops.triton.dependent_launch import launch_options, wait_for_inputs
from services.worker.ops.triton.moe.routing import expert_tile, most_tiles, sort_picks, tile_rows
from services.worker.ops.triton.products import part, times
from services.worker.ops.triton.row_ops import gated_sums, of_outputs, round_rows

SUMMED_AT_ONCE = 1024
NO_BIASES = ExpertBiases(None, None)


class ExpertScales(NamedTuple):
    """Of a mixture's experts whose weights are int8 and whose rows are rounded to it, too."""

    gate_up: Tensor | None
    """float32 [E, 2 * I]"""
    down: Tensor | None
    """float32 [E, hidden]"""


NO_SCALES = ExpertScales(None, None)


def mix_tiles(
    x: Tensor,
    picks: Picks,
    gate_up: Tensor,
    down: Tensor,
    biases: ExpertBiases = NO_BIASES,
    *,
    kind: Activation,
    most: int | None = None,
    scales: ExpertScales = NO_SCALES,
) -> Tensor:
    """Sorted by expert: an expert is read once for each tile of rows. `most`: rows of a tile; None: as many as pay.
    With `scales`, weights are int8 and what they are multiplied with is rounded to it, x and what is between."""
    (rows, hidden), (experts, _, size) = x.shape, down.shape
    chosen = picks.experts.shape[1]
    how = (most or tile_rows(rows * chosen, experts), down.element_size(), generation(x.device))
    up, out = expert_tile(*how, gated=True), expert_tile(*how, gated=False)
    order = sort_picks(picks.experts, experts, up.rows)
    tiles, dependent = most_tiles(rows * chosen, experts, up.rows), launch_options(x.device)
    gated = x.new_empty(tiles * up.rows, size)
    up_tile_kernel[(tiles * triton.cdiv(size, up.columns),)](
        *(*_factors(x, scales), gate_up, scales.gate_up, biases.gate_up, *order, gated, rows * chosen),
        HIDDEN=hidden,
        SIZE=size,
        CHOSEN=chosen,
        KIND=kind,
        ROWS=up.rows,
        COLUMNS=up.columns,
        DEPTH=up.depth,
        SWAPPED=up.swapped,
        num_warps=up.num_warps,
        num_stages=up.num_stages,
        **dependent,
    )
    parts = x.new_empty(rows * chosen, hidden)
    down_tile_kernel[(tiles * triton.cdiv(hidden, out.columns),)](
        *(*_factors(gated, scales), down, scales.down, biases.down, *order, picks.chances, parts, rows * chosen),
        HIDDEN=hidden,
        SIZE=size,
        ROWS=out.rows,
        COLUMNS=out.columns,
        DEPTH=out.depth,
        SWAPPED=out.swapped,
        num_warps=out.num_warps,
        num_stages=out.num_stages,
        **dependent,
    )
    summed = torch.empty_like(x)
    sum_kernel[(rows, triton.cdiv(hidden, SUMMED_AT_ONCE))](
        *(parts, picks.experts, summed), HIDDEN=hidden, CHOSEN=chosen, AT_ONCE=SUMMED_AT_ONCE, num_warps=4, **dependent
    )
    return summed


def _factors(rows: Tensor, scales: ExpertScales) -> tuple[Tensor, Tensor | None]:
    """Rows as they are multiplied, and their scales."""
    return (rows, None) if scales is NO_SCALES else round_rows(rows)


@triton.constexpr_function
def sums_dtype(factors):
    """Of products of such factors."""
    return tl.int32 if factors == tl.int8 else tl.float32


@triton.jit(do_not_specialize=["picks"])
def up_tile_kernel(
    x,
    row_scales,
    gate_up,
    scales,
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
    expert = tl.load(tile_experts + tile).to(tl.int64)
    place = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pick = tl.load(sorted_picks + place)
    # Of few rows most of a tile is padding: it counts as zeros that are not fetched.
    there = (pick < picks)[:, None]
    column = tl.program_id(0) % WIDE * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    rows = x + (pick // CHOSEN).to(tl.int64)[:, None] * HIDDEN + depth[None, :]
    gates = gate_up + expert * (2 * SIZE * HIDDEN) + (tl.minimum(column, SIZE - 1)[:, None] * HIDDEN + depth[None, :])
    ups = gates + SIZE * HIDDEN
    gate = tl.zeros([COLUMNS, ROWS] if SWAPPED else [ROWS, COLUMNS], sums_dtype(x.dtype.element_ty))
    up = tl.zeros([COLUMNS, ROWS] if SWAPPED else [ROWS, COLUMNS], sums_dtype(x.dtype.element_ty))
    for start in tl.range(0, HIDDEN, DEPTH):
        values = part(rows, there, depth, start, HIDDEN, DEPTH)
        gate = times(values, part(gates, True, depth, start, HIDDEN, DEPTH), gate, SWAPPED)
        up = times(values, part(ups, True, depth, start, HIDDEN, DEPTH), up, SWAPPED)
        rows += DEPTH
        gates += DEPTH
        ups += DEPTH
    if scales is not None:
        of_rows = tl.load(row_scales + pick // CHOSEN, mask=pick < picks, other=0.0)
        gate = scaled(gate, of_rows, of_outputs(scales, expert, column, 2 * SIZE), SWAPPED)
        up = scaled(up, of_rows, of_outputs(scales, expert, column + SIZE, 2 * SIZE), SWAPPED)
    if biases is not None:
        gate += along_columns(of_outputs(biases, expert, column, 2 * SIZE), SWAPPED)
        up += along_columns(of_outputs(biases, expert, column + SIZE, 2 * SIZE), SWAPPED)
    made = gated_sums(gate, up, KIND).to(gated.dtype.element_ty)
    if SWAPPED:
        made = tl.trans(made)
    tl.store(gated + place[:, None] * SIZE + column[None, :], made, mask=there & (column < SIZE)[None, :])


@triton.jit(do_not_specialize=["picks"])
def down_tile_kernel(
    gated,
    row_scales,
    down,
    scales,
    biases,
    sorted_picks,
    tile_experts,
    tiles,
    chances,
    parts,
    picks,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
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
    expert = tl.load(tile_experts + tile).to(tl.int64)
    place = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pick = tl.load(sorted_picks + place)
    there = (pick < picks)[:, None]
    column = tl.program_id(0) % WIDE * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    rows = gated + place[:, None] * SIZE + depth[None, :]
    weights = down + expert * (HIDDEN * SIZE) + (tl.minimum(column, HIDDEN - 1)[:, None] * SIZE + depth[None, :])
    total = tl.zeros([COLUMNS, ROWS] if SWAPPED else [ROWS, COLUMNS], sums_dtype(gated.dtype.element_ty))
    for start in tl.range(0, SIZE, DEPTH):
        values = part(rows, there, depth, start, SIZE, DEPTH)
        total = times(values, part(weights, True, depth, start, SIZE, DEPTH), total, SWAPPED)
        rows += DEPTH
        weights += DEPTH
    if scales is not None:
        total = scaled(total, tl.load(row_scales + place), of_outputs(scales, expert, column, HIDDEN), SWAPPED)
    if biases is not None:
        total += along_columns(of_outputs(biases, expert, column, HIDDEN), SWAPPED)
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
    """A tile of int32 sums as float32. row_scales [ROWS], scales [COLUMNS]"""
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
