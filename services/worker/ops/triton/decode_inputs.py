"""The inputs of the next decodes, written on the device in one launch each: the tokens just sampled, positions moved
back by rejected drafts, and batches padded to a captured size.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128


def feed(table: Tensor, cells: Tensor, rows: Tensor | None, tokens: Tensor) -> None:
    """tokens [R] of any kind of integer → int32 in `table`, in the cell behind that of its row.

    cells int32 [n], one for each row of the step; rows int32 [R] names those that were drawn behind, None: the first R.
    """
    count = len(tokens)
    if count:
        named = cells if rows is None else rows
        feed_kernel[(triton.cdiv(count, BLOCK),)](
            table, cells, named, tokens, count, NAMED=rows is not None, BLOCK=BLOCK, num_warps=4
        )


@triton.jit(do_not_specialize=["count"])
def feed_kernel(table, cells, rows, tokens, count, NAMED: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK tokens a program."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = number < count
    row = tl.load(rows + number, mask=there, other=0) if NAMED else number
    cell = tl.load(cells + row, mask=there, other=0).to(tl.int64)
    tl.store(table + cell + 1, tl.load(tokens + number, mask=there, other=0).to(tl.int32), mask=there)


# Decodes moved back by their rejected drafts, see `services.worker.speculation.verification`.
#
# Bytes moved for P decodes in each of K steps: 4·P for the counts, and 36·K·P: positions, contexts and cells are read
# and written, a block's number is read and a slot written; 8·K·P less without cells.


ROWS = 128


def move_back(
    short: Tensor,
    positions: Tensor,
    slots: Tensor,
    contexts: Tensor,
    tables: Tensor,
    block_size: int,
    cells: Tensor | None = None,
) -> None:
    """short int32 [P]; positions, slots and contexts int32 [K, P], their last dimension contiguous and all of one
    stride; tables int32 [P, width] of blocks of `block_size` tokens, contiguous; cells int32 [P], where K is 1."""
    steps, count = positions.shape
    if count:
        move_back_kernel[(triton.cdiv(count, ROWS), steps)](
            *(short, positions, slots, contexts, tables, positions if cells is None else cells),
            *(count, positions.stride(0), tables.shape[1], cells is not None),
            TOKENS=block_size,
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
    """Grid (rows, steps): ROWS decodes of one step a program. Where there are cells there is one step."""
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


# A batch of decodes into the memory that a captured one is read from, padded to its size: one launch, not seven. Bytes
# moved, n decodes padded to m, tables of w blocks: 8·n·(4 + w) + 8·(m - n).


AT_ONCE = 256
"""Blocks of a table."""


class DecodeRows(NamedTuple):
    """int32, [rows] each but for the tables."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    context_lens: Tensor
    block_tables: Tensor
    """[rows, width]"""


def pad_decodes(rows: DecodeRows, into: DecodeRows, size: int, *, slot: int, context: int) -> None:
    """The first `size` of `into` are `rows` then, and behind those padding with this slot and context; whatever else
    `into` holds of padding, and of its wider tables, stays."""
    count, width = rows.block_tables.shape
    pad_decodes_kernel[(size,)](
        *rows, *into, count, width, into.block_tables.shape[1], SLOT=slot, CONTEXT=context, AT_ONCE=AT_ONCE, num_warps=2
    )


@triton.jit(
    do_not_specialize=["count", "width", "into_width"],
    do_not_specialize_on_alignment=["ids", "positions", "slots", "contexts", "tables"],
)
def pad_decodes_kernel(
    ids,
    positions,
    slots,
    contexts,
    tables,
    into_ids,
    into_positions,
    into_slots,
    into_contexts,
    into_tables,
    count,
    width,
    into_width,
    SLOT: tl.constexpr,
    CONTEXT: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One row a program."""
    row = tl.program_id(0)
    if row >= count:
        tl.store(into_slots + row, SLOT)
        tl.store(into_contexts + row, CONTEXT)
    else:
        tl.store(into_ids + row, tl.load(ids + row))
        tl.store(into_positions + row, tl.load(positions + row))
        tl.store(into_slots + row, tl.load(slots + row))
        tl.store(into_contexts + row, tl.load(contexts + row))
        source, target = tables + row.to(tl.int64) * width, into_tables + row.to(tl.int64) * into_width
        for start in tl.range(0, width, AT_ONCE):
            block = start + tl.arange(0, AT_ONCE)
            tl.store(target + block, tl.load(source + block, mask=block < width, other=0), mask=block < width)
