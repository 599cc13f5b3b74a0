"""Trees of drafts as rows of a step: whom each follows, where its keys and values lie, and which are accepted. Pure.

A row of a tree sees what it would see as a decode of its own path: a block table in which the path lies in its order,
at its positions. So attention needs to know no trees, and a row's result is that of the same tokens without any draft,
to the last bit. The first path, of each row's first child, lies in the sequence's own blocks. Every other branch has
blocks of its own from the position on at which it leaves another path (`BranchBlocks`); what that block holds before is
copied to it, in each layer, once the step's rows are stored (`SlotCopies`). When the drafts are verified, the accepted
path is copied to the sequence's blocks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.worker.batch.rows import Indices, Int32s, Rows

MAX_TREES = 16
"""Sequences that may have a tree in one step; the others have its first path."""
LANE_BLOCKS = 2
"""Blocks that the drafts of a path lie in at the most: none is longer than a block."""


class TreeShape(NamedTuple):
    """How large trees may be."""

    topk: int
    """Tokens that may follow one; more than 1."""
    depth: int
    """Drafts of a path at the most."""
    drafts: int
    """Drafts of a tree at the most."""
    min_prob: float = 0.0
    """How likely a draft's path must be to be accepted, as the drafter sees it."""

    @property
    def least_value(self) -> float:
        """The logarithm of that; of 0 one above that of what cannot be."""
        return math.log(max(self.min_prob, sys.float_info.min))

    def of_depth(self, limit: int) -> int:
        """Drafts of a tree whose paths have no more than `limit`: in proportion."""
        return -(-self.drafts * min(limit, self.depth) // self.depth)

    @property
    def rows_per_draft(self) -> int:
        """Rows that a step has for each draft that a path may have."""
        return -(-self.drafts // self.depth)

    def branch_blocks(self, max_sequences: int) -> int:
        """Blocks of branches, for the trees of a step: one for each draft, as few branches need two and the first path
        needs none."""
        return min(max_sequences, MAX_TREES) * self.drafts

    def lane_blocks(self, max_sequences: int) -> int:
        """Blocks of a drafter's lanes, see `speculation.trees.lanes`."""
        return min(max_sequences, MAX_TREES) * self.topk * 2 * LANE_BLOCKS


class BranchBlocks:
    """Owns the numbers of the blocks that branches have while a step lasts. They lie behind those that the scheduler
    knows."""

    def __init__(self, first: int, count: int) -> None:
        self._first, self._count = first, count
        self._taken = 0

    def begin_step(self) -> None:
        """All are free."""
        self._taken = 0

    @property
    def free(self) -> int:
        """How many are not taken."""
        return self._count - self._taken

    def take(self, count: int) -> range:
        """So many that nobody has in this step."""
        assert count <= self.free, "the caller looks first"
        first = self._first + self._taken
        self._taken += count
        return range(first, first + count)


class _Lane(NamedTuple):
    """A path from where it leaves another one, or from the sequence's last token."""

    leaves: int
    """The row that its first one follows."""
    first: int
    """Its first row."""
    end: int
    """Behind its last row: rows of a lane follow each other."""


class TreeRows(NamedTuple):
    """The rows of one sequence: of its last token and of each draft, numbered in this order. A draft stands behind the
    one that it follows; the first that follows a row is the next row."""

    parents: list[int]
    """The row that each follows; 0 of the first."""
    depths: list[int]
    slots: list[int]
    """Where each row's key and value lie."""
    tables: dict[int, dict[int, int]]
    """Of each row of a branch the blocks that are not the sequence's own, by their number in its table."""
    copies: list[tuple[int, int]]
    """(from, to) slots"""
    tokens: Int32s = np.zeros(0, dtype=np.int32)
    """Of each draft."""

    @property
    def drafts(self) -> int:
        """How many there are."""
        return len(self.parents) - 1


NO_DRAFTS = TreeRows([0], [0], [], {}, [])
"""Of a sequence without any; wherever its rows lie."""


def lay_out(parents: list[int], position: int, table: Int32s, block_size: int, blocks: BranchBlocks) -> TreeRows:
    """`parents`: of each draft the number of the row that it follows, see `TreeRows`. The last token is at `position`,
    its sequence has the block `table`. Where too few `blocks` are left, only the first path has rows."""
    parents = [0, *parents]
    lanes = _lanes(parents)
    depths = _depths(parents)

    def block_of(row: int) -> int:
        return (position + depths[row]) // block_size

    needed = sum(block_of(lane.end - 1) + 1 - block_of(lane.first) for lane in lanes[1:])
    if needed > blocks.free:
        end = lanes[0].end
        parents, depths, lanes = parents[:end], depths[:end], lanes[:1]
    tree = TreeRows(parents, depths, [], {}, [])
    for lane in lanes:
        if lane.first:
            first = block_of(lane.first)
            own = dict(enumerate(blocks.take(block_of(lane.end - 1) + 1 - first), start=first))
            shared = {number: block for number, block in tree.tables.get(lane.leaves, {}).items() if number < first}
            tree.tables.update(dict.fromkeys(range(lane.first, lane.end), shared | own))
            tree.copies.extend(_copied(tree, lane, position, table, block_size))
        for row in range(lane.first, lane.end):
            block, offset = divmod(position + depths[row], block_size)
            tree.slots.append(tree.tables.get(row, {}).get(block, int(table[block])) * block_size + offset)
    return tree


def _copied(tree: TreeRows, lane: _Lane, position: int, table: Int32s, block_size: int) -> Iterator[tuple[int, int]]:
    """What a lane's first block holds before its first row."""
    number = (position + tree.depths[lane.first]) // block_size
    begin, to = number * block_size, tree.tables[lane.first][number] * block_size
    for place in range(begin, position):  # computed before
        yield int(table[number]) * block_size + place - begin, to + place - begin
    row = lane.leaves
    while (place := position + tree.depths[row]) >= begin:
        yield tree.slots[row], to + place - begin
        if not row:
            break
        row = tree.parents[row]


def _depths(parents: list[int]) -> list[int]:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


def _lanes(parents: list[int]) -> list[_Lane]:
    begins = [row for row in range(1, len(parents)) if parents[row] != row - 1]
    return [_Lane(parents[first], first, end) for first, end in pairwise([0, *begins, len(parents)])]


class AcceptedPaths(NamedTuple):
    """Which of a step's R rows stand, of Q sequences."""

    rows: Int32s
    """[Q, D + 1] rows in the order of the paths, the last token's first; what lies behind a row's count means
    nothing."""
    counts: Int32s
    """[Q] rows, and so tokens that each sequence gains."""


class DraftTrees(NamedTuple):
    """The drafts of a step some of whose sequences have trees: of the R rows that tokens are drawn behind."""

    tokens: Int32s
    """[R] what each row is of: last tokens and drafts."""
    parents: Int32s
    """[R] which of the R rows each draft follows; its own number for last tokens."""
    levels: Int32s
    """[Q] drafts of the longest path of each sequence."""
    first: Int32s
    """[Q] the row of each sequence's last token."""
    own_slots: Int32s
    """[R] where each row's keys and values go once it is accepted."""
    copies: tuple[Int32s, Int32s]
    """(from, to) slots, see `SlotCopies`."""

    def accepted(self, drawn: Int32s) -> AcceptedPaths:
        """drawn [R], the token behind each row: a path goes on while a row that follows is of that token."""
        following = {
            (parent, token): row
            for row, (parent, token) in enumerate(zip(self.parents.tolist(), self.tokens.tolist(), strict=True))
            if parent != row
        }
        behind = drawn.tolist()
        rows = np.zeros((len(self.first), int(self.levels.max()) + 1), dtype=np.int32)
        counts = np.zeros(len(self.first), dtype=np.int32)
        for sequence, first in enumerate(self.first.tolist()):
            row: int | None = first
            while row is not None:
                rows[sequence, counts[sequence]] = row
                counts[sequence] += 1
                row = following.get((row, behind[row]))
        return AcceptedPaths(rows, counts)


def place_trees(trees: list[TreeRows], rows: Rows, samples: NDArray[np.bool_]) -> DraftTrees:
    """Overwrites in `rows` the ids, slots and block tables of drafts. `trees`, `samples` [W]: of each share of the
    step, one run of rows but for its drafts."""
    counts = np.array([len(tree.parents) for tree in trees])
    first, own_slots = np.cumsum(counts) - counts, rows.kv_slots[rows.last_rows]
    for begin, tree in zip(first.tolist(), trees, strict=True):
        if not tree.drafts:
            continue
        where = rows.last_rows[begin : begin + len(tree.parents)]  # decodes: a row is a sequence, too
        rows.ids[where[1:]] = tree.tokens
        rows.kv_slots[where] = tree.slots
        for row, table in tree.tables.items():
            numbers = [number for number in table if number < rows.block_tables.shape[1]]
            rows.block_tables[where[row], numbers] = [table[number] for number in numbers]
    draws = np.repeat(samples, counts)
    number = np.cumsum(draws, dtype=np.int32) - 1
    parents = np.concatenate([begin + np.array(tree.parents) for begin, tree in zip(first, trees, strict=True)])
    sources, targets = np.array([copy for tree in trees for copy in tree.copies], dtype=np.int32).reshape(-1, 2).T
    return DraftTrees(
        tokens=rows.ids[rows.last_rows[draws]],
        parents=number[parents[draws]],
        levels=np.array([max(tree.depths) for tree in trees], dtype=np.int32)[samples],
        first=number[first[samples]],
        own_slots=own_slots[draws],
        copies=(np.ascontiguousarray(sources), np.ascontiguousarray(targets)),
    )


class AcceptedRows(NamedTuple):
    """What is left of a step's rows without rejected drafts, as if there had been no others."""

    rows: Rows
    kept: Indices
    """[m] which of the step's rows these are."""
    last_rows: Int32s
    """[Q] the row among them that each sequence's last token was drawn behind."""


def accepted_rows(rows: Rows, drawn_rows: Int32s, trees: DraftTrees, accepted: AcceptedPaths) -> AcceptedRows:
    """`rows` of a step, drawn_rows [R] of it; keys and values of what is accepted are in the sequences' own blocks by
    now."""
    stands = np.arange(accepted.rows.shape[1]) < accepted.counts[:, None]
    paths = accepted.rows[stands]
    last_tokens = np.repeat(trees.first, accepted.counts)
    keep = np.ones(len(rows.ids), dtype=np.bool_)
    keep[drawn_rows[trees.parents != np.arange(len(trees.parents))]] = False
    keep[drawn_rows[paths]] = True
    slots, tables = rows.kv_slots.copy(), rows.block_tables.copy()
    slots[drawn_rows] = trees.own_slots
    drafts = paths != last_tokens
    tables[drawn_rows[paths[drafts]]] = rows.block_tables[drawn_rows[last_tokens[drafts]]]
    kept = np.flatnonzero(keep)
    decodes = int(np.count_nonzero(keep[: rows.num_decodes]))
    sequences = np.concatenate((kept[:decodes], np.arange(rows.num_decodes, len(rows.context_lens))))
    starts = rows.query_starts[rows.num_decodes :] - (rows.num_decodes - decodes)
    number = np.cumsum(keep, dtype=np.int32) - 1
    left = rows._replace(
        ids=rows.ids[kept],
        positions=rows.positions[kept],
        kv_slots=slots[kept],
        query_starts=np.concatenate((np.arange(decodes, dtype=np.int32), starts)),
        context_lens=rows.context_lens[sequences],
        block_tables=tables[sequences],
        num_decodes=decodes,
        max_context=int(rows.context_lens[sequences].max()),
        seq_indices=rows.seq_indices[kept],
        last_rows=rows.last_rows[:0],
    )
    last = accepted.rows[np.arange(len(accepted.counts)), accepted.counts - 1]
    return AcceptedRows(left, kept, number[drawn_rows[last]])
