"""States of sequences with drafts: computed once to see what the drafts would say, and again for those accepted.

A state cannot be taken back, as each row has changed all of it. So behind each layer of a step with drafts the states
of the sequences that have some are what they were before it. What their rows brought to the layer is kept; once it is
known how many are accepted, the recurrences of just these are computed anew, which takes no product with weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.worker.batch.batch import Batch
from services.worker.batch.rows import Indices, Int32s
from services.worker.ops.interface import BatchMeta, StateCache, StateMixer, StateOps, StateRows


class _Layer(NamedTuple):
    """What a layer was given of the sequences with drafts."""

    mixer: StateMixer
    cache: StateCache
    projected: Tensor


class DraftedStates:
    """The states that one step's drafts came to; see :class:`services.worker.ops.interface.StateTrial`."""

    def __init__(self, ops: StateOps, batch: Batch, meta: BatchMeta) -> None:
        """`meta`: of the step, in which each draft is a sequence of its own."""
        self._ops = ops
        seq_indices, positions = batch.rows.seq_indices, batch.rows.positions
        firsts = np.flatnonzero(np.diff(seq_indices, prepend=-1))
        counts = np.diff(firsts, append=len(seq_indices)).astype(np.int32)
        self._meta = _of_runs(meta, seq_indices[firsts], positions[firsts], counts)
        drafting = batch.drafted > 0
        self._counts = batch.drafted[drafting] + 1
        first_drawn = batch.first_drawn[drafting]
        self._drafting = drafting
        self._slots = batch.sampled_indices[drafting]
        rows = [batch.drawn_rows[first : first + count] for first, count in zip(first_drawn, self._counts, strict=True)]
        self._rows = torch.from_numpy(np.concatenate(rows).astype(np.int64))
        self._positions = positions[batch.drawn_rows[first_drawn]]
        self._layers: list[_Layer] = []

    def mix(self, projected: Tensor, mixer: StateMixer, cache: StateCache) -> Tensor:
        """See `StateTrial.mix`."""
        slots = torch.from_numpy(self._slots.astype(np.int64))
        windows, states = cache.windows.index_select(0, slots), cache.states.index_select(0, slots)
        mixed = self._ops.mix(projected, mixer, cache, self._meta)
        cache.windows.index_copy_(0, slots, windows)
        cache.states.index_copy_(0, slots, states)
        self._layers.append(_Layer(mixer, cache, projected.index_select(0, self._rows)))
        return mixed

    def accept(self, counts: Int32s) -> None:
        """`counts` [Q]: how many rows stand of each sequence of the batch, its last token's included. Their states go
        on behind these."""
        standing = counts[self._drafting]
        meta = _of_runs(self._meta, self._slots, self._positions, standing)
        within = np.arange(self._counts.sum()) - np.repeat(np.cumsum(self._counts) - self._counts, self._counts)
        rows = torch.from_numpy(np.flatnonzero(within < np.repeat(standing, self._counts)))
        for mixer, cache, projected in self._layers:
            self._ops.mix(projected.index_select(0, rows), mixer, cache, meta)
        self._layers.clear()


def _of_runs(meta: BatchMeta, slots: Indices, firsts: Int32s, counts: Int32s) -> BatchMeta:
    """A step in which the sequences of these slots have a run of rows each, as operations with states read it: `firsts`
    are the positions that the runs begin at."""
    ends, starts = firsts + counts, np.concatenate(([0], np.cumsum(counts)))
    positions = torch.zeros(int(starts[-1]), dtype=torch.int32)
    return replace(
        meta,
        query_starts=torch.from_numpy(starts.astype(np.int32)),
        context_lens=torch.from_numpy(ends.astype(np.int32)),
        positions=positions,
        slots=positions,
        num_decodes=0,
        prefills=tuple(zip(counts.tolist(), ends.tolist(), strict=True)),
        max_query=int(counts.max()),
        max_context=int(ends.max()),
        states=StateRows(torch.from_numpy(slots.astype(np.int64)), None),
    )
