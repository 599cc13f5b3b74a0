"""A batch of decodes into the memory that a captured one is read from, padded to its size: one launch, not seven.

Bytes moved, n decodes padded to m, tables of w blocks: 8·n·(4 + w) + 8·(m - n).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

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
        *rows,
        *into,
        count,
        width,
        into.block_tables.shape[1],
        SLOT=slot,
        CONTEXT=context,
        AT_ONCE=AT_ONCE,
        num_warps=2,
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
