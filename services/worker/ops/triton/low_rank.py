"""Low-rank products of many adapters beside one matrix, in two launches: gathered rows to their adapters' ranks, and
those to outputs (Punica, arXiv:2310.18547; S-LoRA, arXiv:2311.03285).

Rows are sorted by slot and cut into tiles of one adapter each. A tile's work depends on its adapter's own rank, not on
the highest. Inputs are cut into splits of one size, so that few rows fill the device too; the second kernel adds up
their sums in order.

Bytes of n rows with m adapters: m · rank · (in + out) · itemsize of weights, and n · (in + 2 · out) · itemsize of rows.
FLOPs: 2 · n · rank · (in + out).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.low_rank import AdapterRows, AdapterSpan, LowRankPart, LowRankShape, StackedLowRank
from services.worker.ops.transfer import to_device
from services.worker.ops.triton.products import dot, times
from services.worker.ops.triton.products import part as part_of

TILE_ROWS = 16
"""Rows of one adapter that a program multiplies; as few as a tensor core takes."""
COLUMNS = 64
"""Outputs of a program of the second kernel."""
STEP_RANKS = 16
"""Ranks that it multiplies at a time."""
SPLIT_INPUTS = 1024
"""Inputs that a program of it sums."""
MAX_PARTS = 3
"""Projections that are one matrix."""


def program_ranks(max_rank: int) -> int:
    """Ranks that a program of the first kernel sums; one beyond its adapter's rank ends at once."""
    return min(64, max(STEP_RANKS, 1 << (max_rank - 1).bit_length()))


def program_depth(itemsize: int) -> int:
    """Inputs that the first kernel multiplies at a time: 256 bytes of a row, as more of float32 spill registers."""
    return 256 // itemsize


class RowTiling:
    """Cuts the rows of a step into tiles, once for all matrices."""

    def __init__(self) -> None:
        self._latest: tuple[AdapterRows, Tensor] | None = None

    def of(self, rows: AdapterRows) -> Tensor:
        """int32 [tiles, 3] on the device: slot, and from where to where in `rows.order`."""
        if self._latest is None or self._latest[0] is not rows:
            tiles = [
                (slot, first, min(first + TILE_ROWS, end))
                for slot, start, end in rows.spans
                for first in range(start, end, TILE_ROWS)
            ]
            self._latest = (rows, to_device(np.array(tiles, dtype=np.int32), rows.order.device))
        return self._latest[1]


class GatheredLowRank(StackedLowRank):
    """See :class:`services.worker.ops.low_rank.LowRankProducts`."""

    def __init__(self, shape: LowRankShape, device: torch.device, dtype: torch.dtype, tiling: RowTiling) -> None:
        super().__init__(shape, device, dtype)
        assert len(shape.outputs) <= MAX_PARTS
        self._tiling = tiling
        self._ranks = torch.zeros(shape.slots, len(shape.outputs), dtype=torch.int32, device=device)
        """`ranks`, for the kernels."""

    def put(self, slot: int, parts: Sequence[LowRankPart | None]) -> None:
        """Copies, in the order of the device's work."""
        super().put(slot, parts)
        self._ranks[slot].copy_(to_device(np.array(self.ranks[slot], dtype=np.int32), self._ranks.device))

    def clear(self, slot: int) -> None:
        """In the order of the device's work."""
        super().clear(slot)
        self._ranks[slot].zero_()

    def add(self, product: Tensor, x: Tensor, rows: AdapterRows) -> None:
        """Two launches for all adapters."""
        if any(any(self.ranks[slot]) for slot, _, _ in rows.spans):
            self._launch(product, x, rows)

    def compile(self) -> None:
        """Runs both kernels on a row, whose adapter has no rank: what is compiled now holds nobody up later."""
        device, dtype = self.a.device, self.a.dtype
        row = torch.zeros(1, dtype=torch.int32, device=device)
        x, product = (
            torch.zeros(1, width, dtype=dtype, device=device) for width in (self.shape.inputs, self.b.shape[2])
        )
        self._launch(product, x, AdapterRows(row, row, (AdapterSpan(0, 0, 1),)))

    def _launch(self, product: Tensor, x: Tensor, rows: AdapterRows) -> None:
        _, parts, max_rank, inputs = self.a.shape
        tiles, outputs = self._tiling.of(rows), self.shape.outputs
        ranks = program_ranks(max_rank)
        blocks, splits = triton.cdiv(max_rank, ranks), triton.cdiv(inputs, SPLIT_INPUTS)
        lows = torch.empty(splits, len(rows.order), parts, blocks * ranks, dtype=torch.float32, device=x.device)
        shrink_kernel[(len(tiles), parts * blocks, splits)](
            *(x, self.a, self._ranks, rows.order, tiles, lows, len(rows.order)),
            INPUTS=inputs,
            PARTS=parts,
            MAX_RANK=max_rank,
            SPLIT=SPLIT_INPUTS,
            ROWS=TILE_ROWS,
            RANKS=ranks,
            DEPTH=program_depth(self.a.element_size()),
            num_warps=4,
            num_stages=3,
        )
        columns = sum(triton.cdiv(count, COLUMNS) for count in outputs)
        expand_kernel[(len(tiles), columns)](
            *(lows, self.b, self._ranks, rows.order, tiles, product, len(rows.order)),
            OUTPUTS=sum(outputs),
            SECOND=sum(outputs[:1]),
            THIRD=sum(outputs[:2]),
            PARTS=parts,
            MAX_RANK=max_rank,
            LOW_RANKS=blocks * ranks,
            SPLITS=splits,
            ROWS=TILE_ROWS,
            COLUMNS=COLUMNS,
            STEP=STEP_RANKS,
            num_warps=4,
            num_stages=2,
        )


@triton.jit(do_not_specialize=["gathered"])
def shrink_kernel(
    x,
    a,
    ranks,
    order,
    tiles,
    lows,
    gathered,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Grid (tiles, parts and their blocks of ranks, splits of the inputs): `lows` [splits, gathered, parts, ranks] in
    float32; zeros beyond an adapter's rank, up to the end of its last block."""
    BLOCKS: tl.constexpr = (MAX_RANK + RANKS - 1) // RANKS
    tile, split = tl.program_id(0) * 3, tl.program_id(2)
    slot, end = tl.load(tiles + tile).to(tl.int64), tl.load(tiles + tile + 2)
    which = tl.program_id(1) // BLOCKS
    rank = tl.load(ranks + slot * PARTS + which)
    first_rank = tl.program_id(1) % BLOCKS * RANKS
    if first_rank >= rank:
        return
    place = tl.load(tiles + tile + 1) + tl.arange(0, ROWS)
    there = (place < end)[:, None]
    row = tl.load(order + place, mask=place < end, other=0).to(tl.int64)
    depth, lane = tl.arange(0, DEPTH), first_rank + tl.arange(0, RANKS)
    start = split * SPLIT
    values = x + row[:, None] * INPUTS + (start + depth)[None, :]
    # Ranks beyond the last are read as the last.
    held = (slot * PARTS + which) * MAX_RANK + tl.minimum(lane, rank - 1)
    weights = a + held[:, None] * INPUTS + (start + depth)[None, :]
    total = tl.zeros([ROWS, RANKS], tl.float32)
    for at in tl.range(start, tl.minimum(start + SPLIT, INPUTS), DEPTH):
        factors = part_of(values, there, depth, at, INPUTS, DEPTH)
        total = times(factors, part_of(weights, True, depth, at, INPUTS, DEPTH), total, False)
        values += DEPTH
        weights += DEPTH
    total = tl.where((lane < rank)[None, :], total, 0.0)
    to = (split * gathered + place).to(tl.int64) * PARTS + which
    tl.store(lows + to[:, None] * (BLOCKS * RANKS) + lane[None, :], total, mask=there)


@triton.jit(do_not_specialize=["gathered"])
def expand_kernel(
    lows,
    b,
    ranks,
    order,
    tiles,
    product,
    gathered,
    OUTPUTS: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    LOW_RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Grid (tiles, blocks of outputs of one part): adds to `product` [n, OUTPUTS]. SECOND, THIRD: the first outputs of
    these parts; OUTPUTS where there are none."""
    WIDE: tl.constexpr = (SECOND + COLUMNS - 1) // COLUMNS
    WIDE_SECOND: tl.constexpr = (THIRD - SECOND + COLUMNS - 1) // COLUMNS
    tile, block = tl.program_id(0) * 3, tl.program_id(1)
    slot, end = tl.load(tiles + tile).to(tl.int64), tl.load(tiles + tile + 2)
    second, third = (block >= WIDE).to(tl.int32), (block >= WIDE + WIDE_SECOND).to(tl.int32)
    which = second + third
    rank = tl.load(ranks + slot * PARTS + which)
    if rank == 0:
        return
    first_column = second * SECOND + third * (THIRD - SECOND)
    end_column = SECOND + second * (THIRD - SECOND) + third * (OUTPUTS - THIRD)
    column = first_column + (block - second * WIDE - third * WIDE_SECOND) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < end_column)[None, :]
    place = tl.load(tiles + tile + 1) + tl.arange(0, ROWS)
    there = (place < end)[:, None]
    row = tl.load(order + place, mask=place < end, other=0).to(tl.int64)
    lane = tl.arange(0, STEP)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in tl.range(0, rank, STEP):
        low = tl.zeros([ROWS, STEP], tl.float32)
        for split in tl.static_range(SPLITS):
            of = ((split * gathered + place).to(tl.int64) * PARTS + which) * LOW_RANKS + at
            low += tl.load(lows + of[:, None] + lane[None, :], mask=there, other=0.0)
        held = slot * MAX_RANK + at + lane
        weights = tl.load(
            b + held[:, None] * OUTPUTS + column[None, :], mask=(at + lane < rank)[:, None] & inside, other=0.0
        )
        total = dot(low.to(weights.dtype), weights, total)
    to = product + row[:, None] * OUTPUTS + column[None, :]
    summed = tl.load(to, mask=there & inside, other=0.0).to(tl.float32) + total
    tl.store(to, summed.to(product.dtype.element_ty), mask=there & inside)
