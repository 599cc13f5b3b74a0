"""Runs of rows, one behind the other, as a decoder wants them: where each row reads, writes and stands. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.blocks import blocks_for
from shared.machine.anonymous_memory import anonymous_memory

Int32s = NDArray[np.int32]
Indices = NDArray[np.intp]


def untouched_zeros(rows: int, width: int) -> Int32s:
    """Zeros [rows, width] whose pages take no memory until they are written to, one by one."""
    if not rows * width:
        return np.zeros((rows, width), dtype=np.int32)
    return np.frombuffer(anonymous_memory(rows * width * np.dtype(np.int32).itemsize), dtype=np.int32).reshape(
        rows, width
    )


class RowRuns(NamedTuple):
    """Runs of consecutive positions, each of one sequence; a sequence may have several."""

    share: Indices
    """[U] whatever the caller numbers."""
    seq_indices: Indices
    """[U]"""
    starts: Int32s
    """[U] the first position of each."""
    counts: Int32s
    """[U]"""


class Rows(NamedTuple):
    """The rows of all units, those of a single row first; fields as in `ops.BatchMeta`."""

    ids: Int32s
    positions: Int32s
    kv_slots: Int32s
    query_starts: Int32s
    context_lens: Int32s
    block_tables: Int32s
    num_decodes: int
    prefills: tuple[tuple[int, int], ...]
    max_query: int
    max_context: int
    seq_indices: Indices
    """[n] whose row each is."""
    last_rows: Int32s
    """[U] the last row of each unit, in the order that the units were given in."""
    block_size: int
    others: tuple[GroupRows, ...] = ()
    """Of the groups of layers behind the first."""


class GroupRows(NamedTuple):
    """What differs between groups of layers; fields as in `Rows`."""

    kv_slots: Int32s
    block_tables: Int32s


def in_groups(rows: Rows, tables: Sequence[Int32s]) -> Rows:
    """`rows` with those of further groups of layers; `tables`: theirs, by sequence index."""
    block, offset = np.divmod(rows.positions, rows.block_size)
    units = rows.seq_indices[rows.query_starts[:-1]]
    width = rows.block_tables.shape[1]
    others = [
        GroupRows(each[rows.seq_indices, block] * rows.block_size + offset, each[units, :width]) for each in tables
    ]
    return rows._replace(others=tuple(others))


def rows_of(units: RowRuns, block_tables: Int32s, tokens: Int32s, block_size: int) -> Rows:
    """`block_tables`, of blocks of `block_size` tokens, and `tokens` are by sequence index. At least one unit."""
    if (units.counts == 1).all():
        return _single_rows(units.seq_indices, units.starts, block_tables, tokens, block_size)
    order = np.argsort(units.counts > 1, kind="stable")
    seq_indices, starts, counts = units.seq_indices[order], units.starts[order], units.counts[order]
    ends = starts + counts
    query_starts = np.zeros(len(seq_indices) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_starts[1:])
    owner = np.repeat(np.arange(len(seq_indices)), counts)
    positions = np.arange(query_starts[-1], dtype=np.int32) + (starts - query_starts[:-1])[owner]
    rows = seq_indices[owner]
    block, offset = np.divmod(positions, block_size)
    max_context = int(ends.max())
    num_decodes = int(np.count_nonzero(counts == 1))
    last_rows = np.empty(len(seq_indices), dtype=np.int32)
    last_rows[order] = query_starts[1:] - 1
    return Rows(
        ids=tokens[rows, positions],
        positions=positions,
        kv_slots=block_tables[rows, block] * block_size + offset,
        query_starts=query_starts,
        context_lens=ends,
        block_tables=block_tables[seq_indices, : blocks_for(max_context, block_size)],
        num_decodes=num_decodes,
        prefills=tuple(zip(counts[num_decodes:].tolist(), ends[num_decodes:].tolist(), strict=True)),
        max_query=int(counts.max()),
        max_context=max_context,
        seq_indices=rows,
        last_rows=last_rows,
        block_size=block_size,
    )


def _single_rows(
    seq_indices: Indices, positions: Int32s, block_tables: Int32s, tokens: Int32s, block_size: int
) -> Rows:
    """See `rows_of`, for units of a row each: what nearly all steps are made of."""
    ends = positions + 1
    max_context = int(ends.max())
    counting = np.arange(len(seq_indices) + 1, dtype=np.int32)
    return Rows(
        ids=tokens[seq_indices, positions],
        positions=positions,
        kv_slots=block_tables[seq_indices, positions // block_size] * block_size + positions % block_size,
        query_starts=counting,
        context_lens=ends,
        block_tables=block_tables[seq_indices, : blocks_for(max_context, block_size)],
        num_decodes=len(seq_indices),
        prefills=(),
        max_query=1,
        max_context=max_context,
        seq_indices=seq_indices,
        last_rows=counting[:-1],
        block_size=block_size,
    )


def expand_drafts(drafted: Int32s) -> tuple[Indices, Int32s]:
    """Sequences with `drafted` [Q] drafts each have a row for their last token and one for each draft, all of a
    sequence's together: (whose each row is [R], how many drafts stand before it [R])."""
    if not drafted.any():
        return np.arange(len(drafted)), np.zeros_like(drafted)
    owner = np.repeat(np.arange(len(drafted)), drafted + 1)
    first = np.cumsum(drafted + 1) - (drafted + 1)
    return owner, (np.arange(len(owner)) - first[owner]).astype(np.int32)
