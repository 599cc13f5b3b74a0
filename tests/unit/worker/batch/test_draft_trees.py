"""Rows of trees of drafts read their own paths, whatever lies beside them."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from services.worker.batch.draft_trees import (
    NO_DRAFTS,
    AcceptedPaths,
    BranchBlocks,
    TreeRows,
    TreeShape,
    accepted_rows,
    lay_out,
    place_trees,
)
from services.worker.batch.rows import RowRuns, rows_of

SIZE = 16


def random_parents(random: Random, drafts: int, deepest: int) -> list[int]:
    """Of a tree in the order of `TreeRows`."""
    depths, parents, path = [0], [], [0]
    while len(parents) < drafts:
        at = random.randrange(len(path)) if parents else 0
        if depths[path[at]] == deepest:
            continue
        parents.append(path[at])
        depths.append(depths[path[at]] + 1)
        path = [*path[: at + 1], len(parents)]
    return parents


def path_to(parents: list[int], row: int) -> list[int]:
    path = [row]
    while row:
        path.append(row := [0, *parents][row])
    return path[::-1]


class Memory:
    """A cache of one number for each slot, which is read by block tables."""

    def __init__(self) -> None:
        self.slots: dict[int, str] = {}

    def read(self, table: list[int], count: int) -> list[str]:
        return [self.slots[table[place // SIZE] * SIZE + place % SIZE] for place in range(count)]


@pytest.mark.parametrize("seed", range(40))
def test_every_row_reads_the_path_that_it_ends(seed: int) -> None:
    random = Random(seed)
    position, deepest = random.randrange(1, 70), random.randint(1, 16)
    parents = random_parents(random, random.randint(1, 25), deepest)
    table = np.array(random.sample(range(40), 8), dtype=np.int32)
    blocks = BranchBlocks(100, 60)
    tree = lay_out(parents, position, table, SIZE, blocks)
    memory = Memory()
    for place in range(position):
        memory.slots[int(table[place // SIZE]) * SIZE + place % SIZE] = f"known {place}"
    assert len(set(tree.slots)) == len(tree.slots)
    for row, slot in enumerate(tree.slots):
        memory.slots[slot] = f"row {row}"
    before = dict(memory.slots)
    for source, target in tree.copies:
        memory.slots[target] = before[source]
    assert not {source for source, _ in tree.copies} & {target for _, target in tree.copies}
    for row, depth in enumerate(tree.depths):
        own = [tree.tables.get(row, {}).get(number, int(block)) for number, block in enumerate(table)]
        read = memory.read(own, position + depth + 1)
        assert read[:position] == [f"known {place}" for place in range(position)]
        assert read[position:] == [f"row {each}" for each in path_to(parents, row)]
        if row == len(path_to(parents, row)) - 1:
            assert row not in tree.tables, "the first path lies in the sequence's own blocks"


def test_where_blocks_run_out_only_the_first_path_has_rows() -> None:
    table = np.arange(4, dtype=np.int32)
    blocks = BranchBlocks(10, 2)
    parents = [0, 1, 1, 0]
    first = lay_out(parents, 5, table, SIZE, blocks)
    assert (first.drafts, blocks.free) == (4, 0)
    second = lay_out(parents, 5, table, SIZE, blocks)
    assert (second.parents, second.depths, second.tables, second.copies) == ([0, 0, 1], [0, 1, 2], {}, [])
    blocks.begin_step()
    assert lay_out(parents, 5, table, SIZE, blocks) == first


def test_what_is_accepted_is_as_if_nothing_else_had_been_drafted() -> None:
    """A sequence with a tree, one with a chain, one with none, and a part of a prompt."""
    tokens = np.arange(4 * 100, dtype=np.int32).reshape(4, 100)
    tables = np.arange(4 * 7, dtype=np.int32).reshape(4, 7)
    blocks = BranchBlocks(50, 20)
    drafted = [30, 31, 32, 33, 34]  # 30 → 31; then 32 → 33, and 34 behind 32
    tree = lay_out([0, 1, 0, 3, 3], 20, tables[0], SIZE, blocks)._replace(tokens=np.array(drafted, dtype=np.int32))
    chain = lay_out([0, 1], 8, tables[2], SIZE, blocks)._replace(tokens=np.array([7, 8], dtype=np.int32))
    shares: list[TreeRows] = [tree, NO_DRAFTS, chain, NO_DRAFTS]
    share = np.repeat(np.arange(4), [6, 1, 3, 1])
    begins, counts = np.array([20, 40, 8, 60]), np.array([1, 5, 1, 1], dtype=np.int32)
    ahead = np.concatenate([each.depths for each in shares])
    starts = (begins[share] + ahead).astype(np.int32)
    rows = rows_of(RowRuns(share, share, starts, counts[share]), tables, tokens, SIZE)
    samples = np.array([True, False, True, True])
    trees = place_trees(shares, rows, samples)
    drawn_rows = rows.last_rows[samples[share]]
    assert rows.ids[drawn_rows].tolist() == [20, *drafted, 208, 7, 8, 360]
    assert trees.parents.tolist() == [0, 0, 1, 0, 3, 3, 6, 6, 7, 9]
    assert (trees.levels.tolist(), trees.first.tolist()) == ([2, 2, 0], [0, 6, 9])
    # 32 follows the last token, 34 follows that; 7 follows, and 9 follows 7, which was not drafted.
    drawn = np.array([32, 1, 2, 34, 3, 35, 7, 9, 4, 5], dtype=np.int32)
    accepted = trees.accepted(drawn)
    assert accepted.counts.tolist() == [3, 2, 1]
    assert [row[:count].tolist() for row, count in zip(*accepted, strict=True)] == [[0, 3, 5], [6, 7], [9]]
    left, kept, last_rows = accepted_rows(rows, drawn_rows, trees, accepted)
    expected_runs = RowRuns(
        np.array([0, 0, 0, 1, 2, 2, 3]),
        np.array([0, 0, 0, 1, 2, 2, 3]),
        np.array([20, 21, 22, 40, 8, 9, 60], dtype=np.int32),
        np.array([1, 1, 1, 5, 1, 1, 1], dtype=np.int32),
    )
    expected = rows_of(expected_runs, tables, tokens, SIZE)
    assert left.ids[:6].tolist() == [20, 32, 34, 208, 7, 360]
    for field in ("positions", "kv_slots", "query_starts", "context_lens", "block_tables", "seq_indices"):
        assert np.array_equal(getattr(left, field), getattr(expected, field)), field
    assert (left.num_decodes, left.prefills, left.max_context) == (6, expected.prefills, expected.max_context)
    assert np.array_equal(rows.ids[kept], left.ids)
    assert last_rows.tolist() == [2, 4, 5]
    nothing = accepted_rows(rows, drawn_rows, trees, AcceptedPaths(trees.first[:, None], np.ones(3, dtype=np.int32)))
    assert nothing.rows.ids[:3].tolist() == [20, 208, 360]


def test_a_shape_gives_shallower_trees_their_share() -> None:
    shape = TreeShape(topk=4, depth=5, drafts=12)
    assert [shape.of_depth(limit) for limit in (1, 2, 5, 9)] == [3, 5, 12, 12]
    assert shape.rows_per_draft == 3
