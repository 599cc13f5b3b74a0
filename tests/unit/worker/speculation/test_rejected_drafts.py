"""Rows that were prepared for drafts that do not all stand, and moved back: where they would lie had one known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.worker.batch.rows import RowRuns, rows_of
from services.worker.batch.staging import rows_on_device
from services.worker.sampling.parameters import ParameterTable
from services.worker.sampling.random_numbers import RejectedDrafts, race_keys
from services.worker.speculation import verification
from services.worker.speculation.chain import draft_chain
from services.worker.speculation.verification import move_back
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from shared.ids import SequenceId
from shared.messages.generation import SamplingOptions
from shared.messages.worker import NewSequence
from tests.support.kernels.kernel_device import DEVICE

WIDTH = 4 * BLOCK_SIZE
MOST = 5

lengths = st.lists(st.tuples(st.integers(MOST, WIDTH - 1), st.integers(0, MOST)), min_size=1, max_size=5)
"""Of decodes: the position assumed, and by how much that is too high."""


def tables(seq_indices: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.random.default_rng(1).permutation(seq_indices * 4).astype(np.int32).reshape(seq_indices, 4)


def i32(values: object) -> np.ndarray:  # type: ignore[type-arg]
    return np.array(values, dtype=np.int32)


@pytest.fixture(params=["torch", "kernel"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "kernel":
        pytest.importorskip("triton", reason="Triton is for Linux only")
    monkeypatch.setattr(verification, "runs_triton", lambda _device: request.param == "kernel")


@pytest.mark.usefixtures("_way")
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths, st.integers(0, 2))
def test_rows_lie_where_they_would_have_lain(decodes: list[tuple[int, int]], prefills: int) -> None:
    count = len(decodes) + prefills
    seq_indices = np.arange(count)
    blocks, tokens = tables(count), np.zeros((count, WIDTH + 1), dtype=np.int32)
    short = i32([missing for _, missing in decodes] + [0] * prefills)
    starts = i32([position for position, _ in decodes] + [3] * prefills)
    sizes = i32([1] * len(decodes) + [17] * prefills)
    assumed = rows_of(RowRuns(seq_indices, seq_indices, starts, sizes), blocks, tokens, BLOCK_SIZE)
    true = rows_of(RowRuns(seq_indices, seq_indices, starts - short, sizes), blocks, tokens, BLOCK_SIZE)
    ids = (assumed.seq_indices * 100 + assumed.positions).astype(np.int32)
    cells, meta = rows_on_device(assumed._replace(ids=ids), assumed.last_rows, DEVICE)
    move_back(cells, meta, RejectedDrafts(torch.from_numpy(short[assumed.seq_indices]).to(DEVICE), MOST))
    assert cells.tolist() == (true.seq_indices * 100 + true.positions).tolist()
    assert meta.positions.tolist() == true.positions.tolist()
    assert meta.context_lens.tolist() == true.context_lens.tolist()
    assert meta.slots.tolist() == true.kv_slots.tolist()


@pytest.mark.usefixtures("_way")
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths)
def test_so_do_those_of_a_chain_of_drafts(decodes: list[tuple[int, int]]) -> None:
    seq_indices, ahead = np.arange(len(decodes)), i32([[0], [1], [2]])
    positions, short = i32([p for p, _ in decodes]) + ahead - 2, i32([missing for _, missing in decodes])
    positions = np.maximum(positions, MOST)
    blocks = tables(len(decodes))
    moved, true = (
        draft_chain(seq_indices, positions, blocks, BLOCK_SIZE, DEVICE),
        draft_chain(seq_indices, positions - short, blocks, BLOCK_SIZE, DEVICE),
    )
    moved.move_back(RejectedDrafts(torch.from_numpy(short).to(DEVICE), MOST))
    for step in range(3):
        one, other = moved.meta(step), true.meta(step)
        for name in ("positions", "slots", "context_lens"):
            assert getattr(one, name).tolist() == getattr(other, name).tolist()


def test_each_row_is_drawn_by_the_number_of_the_position_that_it_is_at() -> None:
    table = ParameterTable(3, 50)
    for seq_index in range(3):
        sampling = SamplingOptions(seed=7 + seq_index, temperature=1.0)
        table.put(
            seq_index,
            NewSequence(
                sequence=SequenceId(seq_index), tokens=b"", prompt_length=1, computed=0, blocks=b"", sampling=sampling
            ),
        )
    seq_indices, positions, short = np.array([2, 0, 0, 1]), i32([9, 5, 6, 4]), i32([0, 2, 2, 3])
    assumed = table.sampling_batch(seq_indices, positions)
    sent = torch.from_numpy(assumed.candidate_keys())
    assert torch.equal(assumed.select_keys(sent), torch.from_numpy(race_keys(table.seed[seq_indices], positions)))
    behind = type(assumed)(
        assumed.features,
        assumed.by_row,
        positions,
        seq_indices,
        table,
        rejected=RejectedDrafts(torch.from_numpy(short), 3),
    )
    true = race_keys(table.seed[seq_indices], positions - short)
    assert behind.select_keys(torch.from_numpy(behind.candidate_keys())).tolist() == true.tolist()
    some = np.array([1, 3])
    there = torch.from_numpy(some)
    assert behind.select_keys(torch.from_numpy(behind.candidate_keys(some)), there).tolist() == true[some].tolist()
    part = behind.part(1, 3)
    assert part.select_keys(torch.from_numpy(part.candidate_keys())).tolist() == true[1:3].tolist()
