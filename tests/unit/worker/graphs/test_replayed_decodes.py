"""Captured decodes: which steps are replayed, on what, and that nobody sees the padding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from services.worker.batch.rows import RowRuns, Rows, rows_of
from services.worker.batch.staging import rows_on_device
from services.worker.graphs.decode_inputs import MAX_CAPTURED_ROWS, DecodeInputs, capture_sizes, padded_size
from services.worker.graphs.replayed_decodes import ReplayedDecodes
from services.worker.models.weights import KvCaches
from services.worker.ops.interface import BatchMeta, StateCache, StateMixer, StateRows
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from tests.support.worker.emulated_graphs import RunAgain

CPU = torch.device("cpu")
WIDTH, MAX_CONTEXT = 8, 8 * BLOCK_SIZE
VOCAB, HIDDEN = 11, 3
SIZES = (1, 2, 4, 8)


class WrittenForward:
    """A forward pass whose logits say which token of which blocks each row is; it writes to its caches as a decoder
    does, and remembers each call."""

    def __init__(self, *, of_rank_0: bool = True) -> None:
        self.calls: list[BatchMeta] = []
        self._of_rank_0 = of_rank_0

    def __call__(self, ids: Tensor, meta: BatchMeta, caches: KvCaches, features: Tensor | None = None) -> Tensor | None:
        self.calls.append(meta)
        caches[0][0].index_copy_(0, meta.slots.long() + 1, ids.float())
        of_context = torch.arange(meta.block_tables.shape[1]) * BLOCK_SIZE < meta.context_lens[:, None]
        owner = torch.bucketize(torch.arange(len(ids), dtype=torch.int32), meta.query_starts[1:], right=True)
        seen = (meta.block_tables * of_context).sum(1).index_select(0, owner)
        rows = ids.float() * 1000 + meta.positions + seen / 256
        if features is not None:
            features.copy_(rows[:, None].expand(-1, HIDDEN))
        if not self._of_rank_0 or not len(meta.logits_rows):
            return None
        return rows.index_select(0, meta.logits_rows)[:, None].expand(-1, VOCAB).contiguous()


class NoTrial:
    """Of drafts; see `StateTrial`."""

    def mix(self, projected: Tensor, mixer: StateMixer, cache: StateCache) -> Tensor:
        raise NotImplementedError


def caches_of() -> KvCaches:
    """A cell for each slot, behind one for what belongs nowhere."""
    return [(torch.zeros(64 * WIDTH * BLOCK_SIZE + 1), torch.zeros(1))]


def replayed(
    forward: WrittenForward, capture: RunAgain, caches: KvCaches, *, features: bool = False
) -> ReplayedDecodes:
    inputs = DecodeInputs(CPU, SIZES[-1], WIDTH, MAX_CONTEXT, BLOCK_SIZE)
    return ReplayedDecodes(
        forward, caches, capture, SIZES, inputs, torch.zeros(SIZES[-1], HIDDEN) if features else None
    )


def decodes(count: int, *, start: int = 20, rows: int = 1) -> Rows:
    """`count` sequences with as many new tokens each behind their first `start` and more."""
    tables = (1 + np.arange(count * WIDTH, dtype=np.int32)).reshape(count, WIDTH)
    tokens = (np.arange(count * MAX_CONTEXT, dtype=np.int32) % 97).reshape(count, -1)
    seq_indices = np.arange(count)
    starts = np.arange(start, start + count, dtype=np.int32)
    return rows_of(
        RowRuns(seq_indices, seq_indices, starts, np.full(count, rows, dtype=np.int32)),
        tables,
        tokens,
        BLOCK_SIZE,
    )


def test_sizes_grow_with_the_batch_and_end_with_the_largest_that_there_can_be() -> None:
    assert capture_sizes(1) == (1,)
    assert capture_sizes(3) == (1, 2, 3)
    assert capture_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert capture_sizes(256)[-3:] == (240, 248, 256)
    assert len(capture_sizes(256)) == 35
    assert capture_sizes(4096)[-3:] == (480, 496, MAX_CAPTURED_ROWS)
    assert all(capture_sizes(most)[-1] == min(most, MAX_CAPTURED_ROWS) for most in range(1, 600))


def test_a_batch_takes_the_least_size_that_it_fits_into() -> None:
    assert [padded_size(rows, SIZES) for rows in (1, 2, 3, 5, 8, 9)] == [1, 2, 4, 8, 8, None]


@pytest.mark.parametrize("count", range(1, 10))
def test_replayed_decodes_give_what_the_forward_pass_gives(count: int) -> None:
    forward, capture, caches = WrittenForward(), RunAgain(), caches_of()
    graphs = replayed(forward, capture, caches)
    rows = decodes(count)
    ids, meta = rows_on_device(rows, rows.last_rows, CPU)
    expected = WrittenForward()(ids, meta, caches_of())
    got = graphs(ids, meta, caches)
    assert capture.replayed == (count <= 8)
    assert torch.equal(got, expected)


def test_only_what_is_no_padding_is_stored() -> None:
    forward, capture = WrittenForward(), RunAgain()
    caches, plain = caches_of(), caches_of()
    graphs = replayed(forward, capture, caches)
    for count, start in ((7, 20), (5, 40), (3, 50), (8, 60), (1, 70)):
        rows = decodes(count, start=start)
        ids, meta = rows_on_device(rows, rows.last_rows, CPU)
        graphs(ids, meta, caches)
        WrittenForward()(ids, meta, plain)
    assert capture.replayed == 5
    assert torch.equal(caches[0][0][1:], plain[0][0][1:])
    assert caches[0][0].count_nonzero() > 20


def test_padded_rows_read_nothing_and_store_nothing_whatever_was_there_before() -> None:
    forward, capture, caches = WrittenForward(), RunAgain(), caches_of()
    graphs = replayed(forward, capture, caches)
    for count in (8, 5):
        rows = decodes(count)
        graphs(*rows_on_device(rows, rows.last_rows, CPU), caches)
    last = forward.calls[-1]
    assert last.slots.tolist() == [*rows.kv_slots.tolist(), -1, -1, -1]
    assert last.context_lens.tolist() == [*rows.context_lens.tolist(), 0, 0, 0]
    assert (last.num_decodes, last.max_context, last.max_query, last.prefills) == (8, MAX_CONTEXT, 1, ())
    assert int(last.positions.min()) >= 0
    assert int(last.positions.max()) < MAX_CONTEXT


def test_states_are_where_the_batch_has_them_and_steps_that_try_drafts_are_not_replayed() -> None:
    forward, capture, caches = WrittenForward(), RunAgain(), caches_of()
    inputs = DecodeInputs(CPU, SIZES[-1], WIDTH, MAX_CONTEXT, BLOCK_SIZE, states=True)
    graphs = ReplayedDecodes(forward, caches, capture, SIZES, inputs)
    rows = decodes(3)
    ids, meta = rows_on_device(rows, rows.last_rows, CPU)
    states = StateRows(torch.tensor([5, 2, 7]), None)
    graphs(ids, replace(meta, states=states), caches)
    last = forward.calls[-1].states
    assert last is not None
    assert last.slots[:3].tolist() == [5, 2, 7]
    assert len(last.slots) == 4
    for other in (None, states._replace(trial=NoTrial())):
        graphs(ids, replace(meta, states=other), caches)
        assert forward.calls[-1].states is other
    assert capture.replayed == 1


def test_sizes_are_captured_once_the_largest_first() -> None:
    forward, capture = WrittenForward(), RunAgain()
    replayed(forward, capture, caches_of())
    assert [meta.num_decodes for meta in forward.calls] == [8, 8, 4, 4, 2, 2, 1, 1]
    assert capture.captured == 4


def test_every_replay_reads_the_same_memory() -> None:
    forward, capture, caches = WrittenForward(), RunAgain(), caches_of()
    graphs = replayed(forward, capture, caches)
    at = {(meta.num_decodes, meta.slots.data_ptr(), meta.block_tables.data_ptr()) for meta in forward.calls}
    for count in (1, 2, 3, 4, 6):
        rows = decodes(count)
        graphs(*rows_on_device(rows, rows.last_rows, CPU), caches)
    assert {(meta.num_decodes, meta.slots.data_ptr(), meta.block_tables.data_ptr()) for meta in forward.calls} == at


def test_prefills_and_mixed_steps_run_as_they_are() -> None:
    forward, capture, caches = WrittenForward(), RunAgain(), caches_of()
    graphs = replayed(forward, capture, caches)
    rows = decodes(2, rows=3)
    ids, meta = rows_on_device(rows, rows.last_rows, CPU)
    assert torch.equal(graphs(ids, meta, caches), WrittenForward()(ids, meta, caches_of()))
    assert capture.replayed == 0
    assert forward.calls[-1] is meta


def test_other_caches_than_those_captured_with_are_not_replayed() -> None:
    forward, capture = WrittenForward(), RunAgain()
    graphs = replayed(forward, capture, caches_of())
    rows = decodes(2)
    others = caches_of()
    graphs(*rows_on_device(rows, rows.last_rows, CPU), others)
    assert capture.replayed == 0
    assert others[0][0].count_nonzero() == 2


def test_a_table_wider_than_those_captured_is_not_replayed() -> None:
    forward, capture, caches = WrittenForward(), RunAgain(), caches_of()
    graphs = ReplayedDecodes(forward, caches, capture, SIZES, DecodeInputs(CPU, SIZES[-1], 1, BLOCK_SIZE, BLOCK_SIZE))
    rows = decodes(2)
    ids, meta = rows_on_device(rows, rows.last_rows, CPU)
    assert torch.equal(graphs(ids, meta, caches), WrittenForward()(ids, meta, caches_of()))
    assert capture.replayed == 0


@pytest.mark.parametrize("wanted", [[2, 0], [1], [2, 1, 0], []])
def test_the_logits_are_those_of_the_rows_asked_for(wanted: list[int]) -> None:
    forward, capture, caches = WrittenForward(), RunAgain(), caches_of()
    graphs = replayed(forward, capture, caches)
    ids, meta = rows_on_device(decodes(3), np.array(wanted, dtype=np.int32), CPU)
    got, expected = graphs(ids, meta, caches), WrittenForward()(ids, meta, caches_of())
    assert capture.replayed == 1
    if not wanted:
        assert got is expected is None
    else:
        assert torch.equal(got, expected)


def test_features_are_given_where_they_were_captured_and_else_computed_as_they_are() -> None:
    rows = decodes(3)
    ids, meta = rows_on_device(rows, rows.last_rows, CPU)
    expected = torch.zeros(3, HIDDEN)
    WrittenForward()(ids, meta, caches_of(), expected)
    for captured in (True, False):
        capture, caches = RunAgain(), caches_of()
        graphs = replayed(WrittenForward(), capture, caches, features=captured)
        features = torch.zeros(3, HIDDEN)
        graphs(ids, meta, caches, features)
        assert torch.equal(features, expected)
        assert capture.replayed == captured
        assert graphs(ids, meta, caches) is not None, "nobody need want them"


def test_ranks_that_do_not_draw_get_no_logits() -> None:
    forward, capture, caches = WrittenForward(of_rank_0=False), RunAgain(), caches_of()
    graphs = replayed(forward, capture, caches)
    rows = decodes(3)
    assert graphs(*rows_on_device(rows, rows.last_rows, CPU), caches) is None
    assert capture.replayed == 1
