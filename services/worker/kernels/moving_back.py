"""Decodes moved back by what they fall short of, in one launch; see `services.worker.shortfall`.

Bytes moved for P decodes in each of K steps: 4·P for what they fall short of, and 36·K·P: positions, contexts and cells
are read and written, a block's number is read and a slot written; 8·K·P less without cells.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shared.blocks import BLOCK_SIZE

ROWS = 128


def move_back(
    short: Tensor, positions: Tensor, slots: Tensor, contexts: Tensor, tables: Tensor, cells: Tensor | None = None
) -> None:
    """short int32 [P]; positions, slots and contexts int32 [K, P], their last dimension contiguous and all of one
    stride; tables int32 [P, width], contiguous; cells int32 [P], where K is 1."""
    steps, count = positions.shape
    if count:
        move_back_kernel[(triton.cdiv(count, ROWS), steps)](
            *(short, positions, slots, contexts, tables, positions if cells is None else cells),
            *(count, positions.stride(0), tables.shape[1], cells is not None),
            TOKENS=BLOCK_SIZE,
            ROWS=ROWS,
            num_warps=4,
        )


@triton.jit(
    do_not_specialize=["count", "stride", "width", "celled"],
    do_not_specialize_on_alignment=["short", "positions", "slots", "contexts", "tables", "cells"],
)
def move_back_kernel(
    short,
    positions,
    slots,
    contexts,
    tables,
    cells,
    count,
    stride,
    width,
    celled,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < count
    missing = tl.load(short + row, mask=there, other=0)
    own = there & celled
    tl.store(cells + row, tl.load(cells + row, mask=own, other=0) - missing, mask=own)
    at = tl.program_id(1) * stride + row
    tl.store(contexts + at, tl.load(contexts + at, mask=there, other=0) - missing, mask=there)
    position = tl.load(positions + at, mask=there, other=0) - missing
    tl.store(positions + at, position, mask=there)
    block = tl.load(tables + row.to(tl.int64) * width + position // TOKENS, mask=there, other=0)
    tl.store(slots + at, block * TOKENS + position % TOKENS, mask=there)
