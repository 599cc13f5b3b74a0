"""Few rows through their experts, without tensor cores: each reads its own weights, in two launches.

Gates and ups first, a pick (one of a row's experts) at a time; then one kernel sums the outputs of a row's experts.

Bytes of n rows: 3 · n · chosen · I · hidden · itemsize of weights, and 2 · n · (hidden + chosen · I) · itemsize beside.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.kernels.activations import activated
from services.worker.kernels.moe_tiles import down_row_tile, up_row_tile
from services.worker.kernels.routing import Picks
from services.worker.ops import Activation

UNROLLED = tl.constexpr(4)
"""Turns of a loop over a row's elements whose loads are on their way together."""


def mix_rows(x: Tensor, picks: Picks, gate_up: Tensor, down: Tensor, *, kind: Activation) -> Tensor:
    """Row by row, for few of them: an expert is read once for each row that chose it."""
    (rows, hidden), chosen, size = x.shape, picks.experts.shape[1], down.shape[2]
    gated = x.new_empty(rows * chosen, size)
    tile = up_row_tile(x.element_size())
    up_row_kernel[(triton.cdiv(size, tile.columns), rows * chosen)](
        *(x, gate_up, picks.experts, gated),
        HIDDEN=hidden,
        SIZE=size,
        CHOSEN=chosen,
        KIND=kind,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        num_warps=tile.num_warps,
    )
    out = torch.empty_like(x)
    places = triton.next_power_of_2(chosen)
    tile = down_row_tile(places, x.element_size())
    down_row_kernel[(triton.cdiv(hidden, tile.columns), rows)](
        *(gated, down, *picks, out),
        HIDDEN=hidden,
        SIZE=size,
        CHOSEN=chosen,
        PLACES=places,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        num_warps=tile.num_warps,
    )
    return out


@triton.jit
def up_row_kernel(
    x,
    gate_up,
    experts,
    gated,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    CHOSEN: tl.constexpr,
    KIND: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Grid (columns, picks): act(gate) · up of some columns of one pick."""
    pick = tl.program_id(1)
    expert = tl.load(experts + pick).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    row = x + (pick // CHOSEN).to(tl.int64) * HIDDEN + depth
    # Columns beyond the last are read as the last, and not stored.
    gates = gate_up + expert * (2 * SIZE * HIDDEN) + tl.minimum(column, SIZE - 1)[:, None] * HIDDEN + depth[None, :]
    gate = tl.zeros([COLUMNS, DEPTH], tl.float32)
    up = tl.zeros([COLUMNS, DEPTH], tl.float32)
    for start in tl.range(0, HIDDEN, DEPTH, loop_unroll_factor=UNROLLED):
        there = depth < HIDDEN - start
        values = tl.load(row + start, mask=there, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(gates + start, mask=there[None, :], other=0.0).to(tl.float32) * values
        up += tl.load(gates + SIZE * HIDDEN + start, mask=there[None, :], other=0.0).to(tl.float32) * values
    made = activated(tl.sum(gate, 1), KIND) * tl.sum(up, 1)
    tl.store(gated + pick.to(tl.int64) * SIZE + column, made.to(gated.dtype.element_ty), mask=column < SIZE)


@triton.jit
def down_row_kernel(
    gated,
    down,
    chances,
    experts,
    out,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    CHOSEN: tl.constexpr,
    PLACES: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Grid (columns, rows): the sum over all experts of a row, side by side so that many bytes are on their way."""
    row = tl.program_id(1)
    place, depth = tl.arange(0, PLACES), tl.arange(0, DEPTH)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    pick = row * CHOSEN + place
    chance = tl.load(chances + pick, mask=place < CHOSEN, other=0.0)
    expert = tl.load(experts + pick, mask=place < CHOSEN, other=0).to(tl.int64)
    inputs = gated + pick.to(tl.int64)[:, None] * SIZE + depth[None, :]
    weights = (
        down
        + (expert * (HIDDEN * SIZE))[None, :, None]
        + (tl.minimum(column, HIDDEN - 1) * SIZE)[:, None, None]
        + depth[None, None, :]
    )
    total = tl.zeros([COLUMNS, PLACES, DEPTH], tl.float32)
    for start in tl.range(0, SIZE, DEPTH, loop_unroll_factor=UNROLLED):
        there = (place < CHOSEN)[:, None] & (depth < SIZE - start)[None, :]
        values = tl.load(inputs + start, mask=there, other=0.0).to(tl.float32) * chance[:, None]
        total += tl.load(weights + start, mask=there[None, :, :], other=0.0).to(tl.float32) * values[None, :, :]
    made = tl.sum(tl.sum(total, 2), 1)
    tl.store(out + row.to(tl.int64) * HIDDEN + column, made.to(out.dtype.element_ty), mask=column < HIDDEN)
