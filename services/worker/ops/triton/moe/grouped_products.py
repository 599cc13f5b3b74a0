"""Many rows through their experts: grouped products of rows that are sorted by expert.

Each tile of rows gathers them, multiplies them with the gates and ups of one expert and activates; a second kernel
multiplies what came out with the expert's last matrix and the rows' chances; a third sums the picks of each row in
their order.

Bytes of n rows that meet m experts: 3 · m · I · hidden · itemsize of weights where the tiles of an expert meet in the
caches, and n · ((1 + 2 · chosen + 1) · hidden + 2 · chosen · I) · itemsize of rows. FLOPs: 6 · n · chosen · I · hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.gpu import generation
from services.worker.ops.interface import Activation, Picks
from services.worker.ops.quantized import ExpertBiases
from services.worker.ops.triton.dependent_launch import launch_options, wait_for_inputs
from services.worker.ops.triton.moe.routing import expert_tile, most_tiles, sort_picks, tile_rows
from services.worker.ops.triton.products import dot
from services.worker.ops.triton.row_ops import biases_of, gated_sums

SUMMED_AT_ONCE = 1024
NO_BIASES = ExpertBiases(None, None)


def mix_tiles(
    x: Tensor,
    picks: Picks,
    gate_up: Tensor,
    down: Tensor,
    biases: ExpertBiases = NO_BIASES,
    *,
    kind: Activation,
    most: int | None = None,
) -> Tensor:
    """Sorted by expert: an expert is read once for each tile of rows. `most`: rows of a tile; None: as many as pay."""
    (rows, hidden), (experts, _, size) = x.shape, down.shape
    chosen = picks.experts.shape[1]
    how = (most or tile_rows(rows * chosen, experts), x.element_size(), generation(x.device))
    up, out = expert_tile(*how, gated=True), expert_tile(*how, gated=False)
    order = sort_picks(picks.experts, experts, up.rows)
    tiles, dependent = most_tiles(rows * chosen, experts, up.rows), launch_options(x.device)
    gated = x.new_empty(tiles * up.rows, size)
    up_tile_kernel[(tiles * triton.cdiv(size, up.columns),)](
        *(x, gate_up, biases.gate_up, *order, gated, rows * chosen),
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
        *(gated, down, biases.down, *order, picks.chances, parts, rows * chosen),
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


@triton.jit(do_not_specialize=["picks"])
def up_tile_kernel(
    x,
    gate_up,
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
    gate = tl.zeros([COLUMNS, ROWS] if SWAPPED else [ROWS, COLUMNS], tl.float32)
    up = tl.zeros([COLUMNS, ROWS] if SWAPPED else [ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, HIDDEN, DEPTH):
        values = part(rows, there, depth, start, HIDDEN, DEPTH)
        gate = times(values, part(gates, True, depth, start, HIDDEN, DEPTH), gate, SWAPPED)
        up = times(values, part(ups, True, depth, start, HIDDEN, DEPTH), up, SWAPPED)
        rows += DEPTH
        gates += DEPTH
        ups += DEPTH
    if biases is not None:
        gate += along_columns(biases_of(biases, expert, column, 2 * SIZE), SWAPPED)
        up += along_columns(biases_of(biases, expert, column + SIZE, 2 * SIZE), SWAPPED)
    made = gated_sums(gate, up, KIND).to(gated.dtype.element_ty)
    if SWAPPED:
        made = tl.trans(made)
    tl.store(gated + place[:, None] * SIZE + column[None, :], made, mask=there & (column < SIZE)[None, :])


@triton.jit(do_not_specialize=["picks"])
def down_tile_kernel(
    gated,
    down,
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
    total = tl.zeros([COLUMNS, ROWS] if SWAPPED else [ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, SIZE, DEPTH):
        values = part(rows, there, depth, start, SIZE, DEPTH)
        total = times(values, part(weights, True, depth, start, SIZE, DEPTH), total, SWAPPED)
        rows += DEPTH
        weights += DEPTH
    if biases is not None:
        total += along_columns(biases_of(biases, expert, column, HIDDEN), SWAPPED)
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
def part(pointers, there, depth, start, WHOLE: tl.constexpr, DEPTH: tl.constexpr):
    """A tile [rows, DEPTH] of a matrix with rows of WHOLE elements; zeros beyond them, and in rows not there."""
    if WHOLE % DEPTH == 0:
        values = tl.load(pointers, mask=there, other=0.0)
    else:
        values = tl.load(pointers, mask=there & (depth < WHOLE - start)[None, :], other=0.0)
    return values


@triton.jit
def times(values, weights, total, SWAPPED: tl.constexpr):
    """total + values @ weightsᵀ, or that transposed."""
    if SWAPPED:
        total = dot(weights, tl.trans(values), total)
    else:
        total = dot(values, tl.trans(weights), total)
    return total


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
