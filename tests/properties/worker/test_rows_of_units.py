"""Rows as `rows_of` lays them out, by whichever of its ways, are those that a loop over tokens finds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.worker.batch.rows import RowRuns, expand_drafts, rows_of
from services.worker.speculation.verification import by_sequence
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from shared.blocks import blocks_for

SEQUENCES, WIDTH = 6, 96
LUCK = np.random.default_rng(1)
TOKENS = LUCK.integers(0, 1000, (SEQUENCES, WIDTH)).astype(np.int32)
TABLES = LUCK.permutation(SEQUENCES * blocks_for(WIDTH, BLOCK_SIZE)).reshape(SEQUENCES, -1).astype(np.int32)

Run = tuple[int, int, int]
"""Sequence index, first position, count."""
single = st.tuples(st.integers(0, SEQUENCES - 1), st.integers(0, WIDTH - 1), st.just(1))
several = st.tuples(st.integers(0, SEQUENCES - 1), st.integers(0, WIDTH // 2), st.integers(1, WIDTH // 2))


@given(st.lists(single, min_size=1, max_size=8) | st.lists(single | several, min_size=1, max_size=8))
def test_each_row_reads_and_writes_where_its_token_belongs(runs: list[Run]) -> None:
    seq_indices, starts, counts = (np.array(column, dtype=np.int32) for column in zip(*runs, strict=True))
    rows = rows_of(
        RowRuns(np.arange(len(runs)), seq_indices.astype(np.intp), starts, counts), TABLES, TOKENS, BLOCK_SIZE
    )
    order = sorted(range(len(runs)), key=lambda number: runs[number][2] > 1)
    places = [(runs[i][0], at) for i in order for at in range(runs[i][1], runs[i][1] + runs[i][2])]
    ends = [runs[i][1] + runs[i][2] for i in order]
    assert rows.seq_indices.tolist() == [seq_index for seq_index, _ in places]
    assert rows.positions.tolist() == [at for _, at in places]
    assert rows.ids.tolist() == [TOKENS[seq_index, at] for seq_index, at in places]
    assert rows.kv_slots.tolist() == [
        TABLES[seq_index, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for seq_index, at in places
    ]
    assert rows.context_lens.tolist() == ends
    assert rows.query_starts.tolist() == [0, *np.cumsum([runs[i][2] for i in order])]
    assert rows.block_tables.tolist() == [
        TABLES[runs[i][0], : blocks_for(max(ends), BLOCK_SIZE)].tolist() for i in order
    ]
    lasts = {i: int(rows.query_starts[place + 1]) - 1 for place, i in enumerate(order)}
    assert rows.last_rows.tolist() == [lasts[i] for i in range(len(runs))]
    assert (rows.max_query, rows.max_context) == (max(count for *_, count in runs), max(ends))
    assert rows.num_decodes == sum(count == 1 for *_, count in runs)
    assert rows.prefills == tuple((runs[i][2], runs[i][1] + runs[i][2]) for i in order if runs[i][2] > 1)
    for array in (rows.ids, rows.positions, rows.kv_slots, rows.query_starts, rows.context_lens, rows.block_tables):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous


@given(st.lists(st.integers(0, 3) | st.just(0), max_size=6))
def test_drafts_lie_behind_the_token_that_they_follow(drafted: list[int]) -> None:
    counts = np.array(drafted, dtype=np.int32)
    owner, ahead = expand_drafts(counts)
    expected = [(number, place) for number, count in enumerate(drafted) for place in range(count + 1)]
    assert list(zip(owner.tolist(), ahead.tolist(), strict=True)) == expected
    drawn = np.arange(1, len(expected) + 1, dtype=np.int32)
    tokens = by_sequence(drawn, counts)
    assert tokens.shape == (len(drafted), max(drafted, default=0) + 1)
    assert [tokens[number, place] for number, place in expected] == drawn.tolist()
    assert tokens.sum() == drawn.sum(), "zeros elsewhere"
