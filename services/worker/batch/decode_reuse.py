"""Steps that decode just those sequences that the step before decoded: nearly all steps are such ones.

Everything but the tokens moves on by one place, so that a dozen additions do for what takes a hundred operations anew.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from services.worker.batch.batch import Batch, BrokenPlan
from services.worker.batch.rows import Int32s, in_groups
from services.worker.batch.sequences import SequenceTable
from services.worker.sampling.parameters import SamplingBatch
from shared.blocks import blocks_for
from shared.messages.worker import SequenceWork


class _PreviousStep(NamedTuple):
    work: tuple[SequenceWork, ...]
    batch: Batch
    choices: SamplingBatch
    room: Int32s
    """[Q] tokens that each one's blocks hold."""
    whole: int
    """Further steps until somebody's row is the first of a block."""


class DecodeReuse:
    """Owns the last batch, where it was one of decodes that each drew a token."""

    def __init__(self, sequences: SequenceTable) -> None:
        self._sequences = sequences
        self._before: _PreviousStep | None = None

    def forget(self) -> None:
        """The next batch has to be made anew."""
        self._before = None

    def remember(self, work: tuple[SequenceWork, ...], batch: Batch) -> None:
        """A batch that was made in another way. Each of its sequences has its next token on the way."""
        choices, rows = batch.choices, batch.rows
        single = rows.max_query == 1 and len(batch.sampled) == len(work) == len(rows.positions)
        if not single or any(item.speculate for item in work) or batch.prompts.parts or batch.pooled.spans:
            self._before = None  # who may draft is asked again at every step
        elif choices is None or not choices.table.position_independent(choices):
            self._before = None
        else:
            room = self._sequences.blocks.room(batch.sampled_indices)
            self._before = _PreviousStep(work, batch, choices, room, _whole(rows.positions, rows.block_size))

    def next(self, work: tuple[SequenceWork, ...]) -> Batch | None:
        """The batch of `work`, which counts as computed from here on; None, and nothing done, where that does not go on
        with all sequences of the last one and no others."""
        before = self._before
        if before is None or not (work == before.work or goes_on(before.work, work)):
            return None
        rows = before.batch.rows
        if rows.max_context + 2 > self._sequences.tokens.shape[1]:  # somebody's context is full
            return None
        ends, room, blocks = rows.context_lens + 1, before.room, self._sequences.blocks
        grown = blocks.append_new(before.batch.sampled_indices, work)
        if grown:
            room = blocks.room(before.batch.sampled_indices)
        if (ends > room).any():
            raise BrokenPlan(f"{work[int((ends > room).argmax())]}: its blocks are full")
        return self._moved_on(before, work, ends, room, tables_changed=grown)

    def _moved_on(
        self, before: _PreviousStep, work: tuple[SequenceWork, ...], ends: Int32s, room: Int32s, *, tables_changed: bool
    ) -> Batch:
        batch, old, size = before.batch, before.batch.rows, before.batch.rows.block_size
        seq_indices, positions, kv_slots, whole = old.seq_indices, old.positions + 1, old.kv_slots + 1, before.whole - 1
        blocks, at_boundary = self._sequences.blocks, whole < 0
        if blocks.windows and (at_boundary or tables_changed):
            blocks.forget_behind(seq_indices, positions)
        if whole < 0:
            first = np.flatnonzero(positions % size == 0)
            kv_slots[first] = self._sequences.block_tables[seq_indices[first], positions[first] // size] * size
            whole = _whole(positions, size)
        width = blocks_for(old.max_context + 1, size)
        if tables_changed or width != old.block_tables.shape[1]:
            tables = self._sequences.block_tables[seq_indices, :width]
        else:
            tables = old.block_tables
        rows = old._replace(
            ids=np.empty_like(positions),
            positions=positions,
            kv_slots=kv_slots,
            context_lens=ends,
            block_tables=tables,
            max_context=old.max_context + 1,
        )
        if old.others and (at_boundary or tables is not old.block_tables):
            rows = in_groups(rows, blocks.others)
        elif old.others:
            rows = rows._replace(others=tuple(each._replace(kv_slots=each.kv_slots + 1) for each in old.others))
        choices = before.choices.later(1)
        moved = Batch(
            rows=rows,
            logits_rows=batch.logits_rows,
            sampled=batch.sampled,
            sampled_indices=batch.sampled_indices,
            drafted=batch.drafted,
            choices=choices,
            drawn_rows=batch.drawn_rows,
            prompts=batch.prompts,
            shifts=self._sequences.shifts.of(seq_indices, positions),
            encoded=None if batch.encoded is None else batch.encoded.written(),
        )
        self._sequences.count_computed(seq_indices)
        self._before = _PreviousStep(work, moved, choices, room, whole)
        return moved


def goes_on(before: tuple[SequenceWork, ...], work: tuple[SequenceWork, ...]) -> bool:
    """Whether `work` is a plain decode of each sequence of `before`, in its order, some with a new block."""
    return len(work) == len(before) and all(
        one.sequence == other.sequence and one.count == 1 and one.sample and not one.speculate
        for one, other in zip(work, before, strict=True)
    )


def _whole(positions: Int32s, block_size: int) -> int:
    """Steps in which nobody's row is the first of a block, from here on."""
    return block_size - 1 - int((positions % block_size).max())
