"""A mixture of experts: routing, and products of each row with the experts that were chosen for it.

There are two ways. Few rows (`one_by_one`) each read their own experts, here; many are sorted by expert first, in
`grouped_products`. Neither asks the device anything, and no sum depends on which program ends first.

Bytes and FLOPs of n rows that meet m different experts:

    3 · m · I · hidden · itemsize  +  n · (2 · hidden · itemsize + E · itemsize)
    6 · n · chosen · I · hidden

Few rows are computed without tensor cores, in two launches: gates and ups first, a pick (one of a row's experts) at a
time; then one kernel sums the outputs of a row's experts. Programs are single warps, whose 32 lanes read a line of 16
bytes each. So a row's elements lie in registers as the weights beside them do: nothing goes through shared memory, and
no barrier keeps a loop's loads from being on their way together. They move 3 · n · chosen · I · hidden · itemsize bytes
of weights, and 2 · n · (hidden + chosen · I) · itemsize beside.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.interface import Activation, Picks, Routing
from services.worker.ops.quantized import ExpertBiases
from services.worker.ops.torch_routing import route as route_by_torch
from services.worker.ops.triton.codes import CodedStack
from services.worker.ops.triton.dependent_launch import launch_options, wait_for_inputs
from services.worker.ops.triton.moe.grouped_products import NO_BIASES, mix_tiles
from services.worker.ops.triton.moe.routing import (
    AT_ONCE,
    TILE_ROWS,
    down_row_tile,
    one_by_one,
    route,
    sort_picks,
    up_row_tile,
)
from services.worker.ops.triton.row_ops import gated_sums, gating, of_outputs

MAX_UNROLL = tl.constexpr(4)
"""Turns of a loop over a row's elements whose loads are on their way together, at most."""


def mix_rows(
    x: Tensor, picks: Picks, gate_up: Tensor, down: Tensor, biases: ExpertBiases = NO_BIASES, *, kind: Activation
) -> Tensor:
    """Row by row, for few of them: an expert is read once for each row that chose it."""
    (rows, hidden), chosen, size = x.shape, picks.experts.shape[1], down.shape[2]
    gated = x.new_empty(rows * chosen, size)
    tile = up_row_tile(x.element_size())
    up_row_kernel[(triton.cdiv(size, tile.columns), rows * chosen)](
        *(x, gate_up, biases.gate_up, picks.experts, gated),
        HIDDEN=hidden,
        SIZE=size,
        CHOSEN=chosen,
        **gating(kind),
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        num_warps=1,
        **launch_options(x.device),
    )
    out = torch.empty_like(x)
    tile = down_row_tile(x.element_size())
    down_row_kernel[(triton.cdiv(hidden, tile.columns), rows)](
        *(gated, down, biases.down, *picks, out),
        HIDDEN=hidden,
        SIZE=size,
        CHOSEN=chosen,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        num_warps=1,
        **launch_options(x.device),
    )
    return out


@triton.constexpr_function
def unroll_factor(elements, depth):
    """How often a loop over so many elements, `depth` at a time, is unrolled: MAX_UNROLL times or a few less, so that
    no iteration is left over that would wait for its loads by itself."""
    iterations = -(-elements // depth)
    return -(-iterations // -(-iterations // MAX_UNROLL.value))


@triton.jit
def up_row_kernel(
    x,
    gate_up,
    biases,
    experts,
    gated,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    CHOSEN: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (columns, picks): act(gate) · up of some columns of one pick."""
    wait_for_inputs(DEPENDENT)
    UNROLL: tl.constexpr = unroll_factor(HIDDEN, DEPTH)
    ROUNDED: tl.constexpr = (HIDDEN + UNROLL * DEPTH - 1) // (UNROLL * DEPTH) * (UNROLL * DEPTH)
    pick = tl.program_id(1)
    expert = tl.load(experts + pick).to(tl.int64)
    if expert < 0:
        return
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    row = x + (pick // CHOSEN).to(tl.int64) * HIDDEN + depth
    # Columns beyond the last are read as the last, and not stored.
    gates = gate_up + expert * (2 * SIZE * HIDDEN) + tl.minimum(column, SIZE - 1)[:, None] * HIDDEN + depth[None, :]
    gate = tl.zeros([COLUMNS, DEPTH], tl.float32)
    up = tl.zeros([COLUMNS, DEPTH], tl.float32)
    for start in tl.range(0, ROUNDED, DEPTH, loop_unroll_factor=UNROLL):
        there = depth < HIDDEN - start
        values = tl.load(row + start, mask=there, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(gates + start, mask=there[None, :], other=0.0).to(tl.float32) * values
        up += tl.load(gates + SIZE * HIDDEN + start, mask=there[None, :], other=0.0).to(tl.float32) * values
    gates_sum, ups_sum = tl.sum(gate, 1), tl.sum(up, 1)
    if biases is not None:
        gates_sum += of_outputs(biases, expert, column, 2 * SIZE)
        ups_sum += of_outputs(biases, expert, column + SIZE, 2 * SIZE)
    made = gated_sums(gates_sum, ups_sum, KIND, LIMIT)
    tl.store(gated + pick.to(tl.int64) * SIZE + column, made.to(gated.dtype.element_ty), mask=column < SIZE)


@triton.jit
def down_row_kernel(
    gated,
    down,
    biases,
    chances,
    experts,
    out,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    CHOSEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (columns, rows): the sum over all experts of a row."""
    wait_for_inputs(DEPENDENT)
    UNROLL: tl.constexpr = unroll_factor(SIZE, DEPTH)
    ROUNDED: tl.constexpr = (SIZE + UNROLL * DEPTH - 1) // (UNROLL * DEPTH) * (UNROLL * DEPTH)
    row = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    columns = down + tl.minimum(column, HIDDEN - 1)[:, None] * SIZE + depth[None, :]
    total = tl.zeros([COLUMNS, DEPTH], tl.float32)
    added = tl.zeros([COLUMNS], tl.float32)
    for place in tl.static_range(CHOSEN):
        pick = row * CHOSEN + place
        expert = tl.load(experts + pick).to(tl.int64)
        if expert >= 0:  # else another rank's
            chance = tl.load(chances + pick)
            weights = columns + expert * (HIDDEN * SIZE)
            if biases is not None:
                added += of_outputs(biases, expert, column, HIDDEN) * chance
            inputs = gated + pick.to(tl.int64) * SIZE + depth
            for start in tl.range(0, ROUNDED, DEPTH, loop_unroll_factor=UNROLL):
                there = depth < SIZE - start
                values = tl.load(inputs + start, mask=there, other=0.0).to(tl.float32) * chance
                total += tl.load(weights + start, mask=there[None, :], other=0.0).to(tl.float32) * values[None, :]
    made = tl.sum(total, 1) + added
    tl.store(out + row.to(tl.int64) * HIDDEN + column, made.to(out.dtype.element_ty), mask=column < HIDDEN)


def choose_experts(logits: Tensor, routing: Routing) -> Picks:
    """The chosen experts of each row, int32: by one launch where a softmax chooses, else by PyTorch's."""
    if routing.plain:
        return route(logits, chosen=routing.chosen, renormalised=routing.renormalised)
    chances, experts = route_by_torch(logits, routing)
    return Picks(chances.contiguous(), experts.to(torch.int32))


def mixture(
    x: Tensor, picks: Picks, gate_up: Tensor, down: Tensor, biases: ExpertBiases = NO_BIASES, *, kind: Activation
) -> Tensor:
    """See `Ops.mixture`. gate_up [E, 2 * I, hidden], down [E, hidden, I], all of x's dtype; picks int32."""
    if one_by_one(len(x), picks.experts.shape[1], len(down)):
        return mix_rows(x, picks, gate_up, down, biases, kind=kind)
    return mix_tiles(x, picks, gate_up, down, biases, kind=kind)


def first_row(picks: Picks) -> Picks:
    """Those of the first row."""
    return Picks(picks.chances[:1], picks.experts[:1])


def compile_all(
    x: Tensor,
    picks: Picks,
    gate_up: Tensor | CodedStack,
    down: Tensor | CodedStack,
    biases: ExpertBiases = NO_BIASES,
    *,
    kind: Activation,
) -> None:
    """Runs every kernel on x's first row, in all sizes of tiles and of sorting: what is compiled now holds nobody up
    later."""
    picks = first_row(picks)
    if isinstance(gate_up, Tensor) and isinstance(down, Tensor):
        mix_rows(x[:1], picks, gate_up, down, biases, kind=kind)
    for most in TILE_ROWS:
        mix_tiles(x[:1], picks, gate_up, down, biases, kind=kind, most=most)
        for at_once in AT_ONCE:
            sort_picks(picks.experts, down.shape[0], most, at_once)
