"""Which rows of a step each rank computes by context parallelism."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.models.context_parallel.shared_step import SharedStep, share_step
from services.worker.ops.interface import BatchMeta, InputRows

SEQUENCES = st.tuples(
    st.lists(st.integers(1, 40), max_size=6), st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40)))
)


def step_of(decodes: list[int], prefills: list[tuple[int, int]]) -> BatchMeta:
    """`decodes`: how long each is; `prefills`: how many rows each has, and what is computed before. A sequence's number
    is in its slots and its block table."""
    lengths = [(1, context) for context in decodes] + [(rows, before + rows) for rows, before in prefills]
    positions = [position for rows, context in lengths for position in range(context - rows, context)]
    sequences = [number for number, (rows, _) in enumerate(lengths) for _ in range(rows)]
    counts = torch.tensor([rows for rows, _ in lengths])
    return BatchMeta(
        query_starts=torch.cat((torch.zeros(1), counts.cumsum(0))).int(),
        context_lens=torch.tensor([context for _, context in lengths]).int(),
        block_tables=torch.arange(len(lengths)).int().unsqueeze(1),
        slots=torch.tensor(sequences).mul(1000).add(torch.tensor(positions)).int(),
        positions=torch.tensor(positions).int(),
        logits_rows=torch.tensor([int(end) - 1 for end in counts.cumsum(0)]).int(),
        num_decodes=len(decodes),
        prefills=tuple(lengths[len(decodes) :]),
        max_query=max(rows for rows, _ in lengths),
        max_context=max(context for _, context in lengths),
        block_size=16,
        inputs=InputRows(torch.arange(len(positions)).int(), torch.arange(len(positions)).float().unsqueeze(1)),
    )


@given(SEQUENCES, st.integers(2, 4))
def test_ranks_have_each_row_once_and_as_one_rank_has_it(
    sequences: tuple[list[int], list[tuple[int, int]]], ranks: int
) -> None:
    if not any(sequences):
        return
    step = step_of(*sequences)
    shared = [share_step(step, rank, ranks) for rank in range(ranks)]
    if any(each is None for each in shared):
        assert shared == [None] * ranks, "all ranks see that one would have nothing"
        return
    own = [each for each in shared if each is not None]
    assert sorted(torch.cat([each.rows for each in own]).tolist()) == list(range(len(step.slots)))
    for each in own:
        check_own(each, step)
    gathered = torch.cat([each.own.slots for each in own]).index_select(0, own[0].every_row.places)
    assert gathered.equal(step.slots)
    wanted = torch.cat([each.own.slots.index_select(0, each.own.logits_rows) for each in own])
    assert wanted.index_select(0, own[0].logits.places).equal(step.slots.index_select(0, step.logits_rows))


def check_own(shared: SharedStep, step: BatchMeta) -> None:
    """A sequence of a rank's step is rows of one that follow each other, behind what it has before them."""
    own = shared.own
    assert own.slots.equal(step.slots.index_select(0, shared.rows))
    starts = own.query_starts.tolist()
    lengths = [1] * own.num_decodes + [rows for rows, _ in own.prefills]
    assert [end - first for first, end in pairwise(starts)] == lengths
    for number, (first, end) in enumerate(pairwise(starts)):
        context = int(own.context_lens[number])
        assert own.positions[first:end].tolist() == list(range(context - (end - first), context))
        assert (own.slots[first:end] // 1000).unique().tolist() == own.block_tables[number].tolist()
    assert own.max_query == max(lengths)
    assert own.max_context == max(own.context_lens.tolist())
    assert own.inputs is not None
    assert own.inputs.values.squeeze(1).tolist() == shared.rows[own.inputs.rows.long()].tolist()


def test_ranks_attend_to_as_much() -> None:
    """Of a whole prompt each rank has the same work, within a row's of a piece."""
    shared = [share_step(step_of([], [(4096, 0)]), rank, 4) for rank in range(4)]
    work = [int(each.own.positions.sum()) for each in shared if each is not None]
    assert len(work) == 4
    assert max(work) - min(work) < 0.001 * sum(work)
