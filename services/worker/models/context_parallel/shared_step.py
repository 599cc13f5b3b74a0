"""Which rows of a step each rank computes by context parallelism, and the step as that rank's own. Knows tensors and
rows; no models, no exchange.

A sequence's rows are cut into two pieces for each rank, of which it has one from the front and its mirror image from
the back ("zig-zag"): as a row attends to all before it, both together cost every rank the same (Llama 3,
arXiv:2407.21783, section 3.3.2). Which rank has the outermost pieces goes round with the sequences, so decodes, which
have one row each, go to all ranks in turn.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.distributed.host_memory import RowRange
from services.worker.ops.interface import BatchMeta, InputRows

_RowNumbers = NDArray[np.int64]


class Scattered(NamedTuple):
    """How rows lie once those of all ranks are gathered: rank behind rank."""

    shares: tuple[RowRange, ...]
    """Of each rank."""
    places: Tensor
    """int64 [n]: where each row lies."""


class SharedStep(NamedTuple):
    """One rank's part of a step."""

    rows: Tensor
    """int64: those that it computes."""
    own: BatchMeta
    """The step as if there were no others."""
    whole: BatchMeta
    """All of it."""
    every_row: Scattered
    logits: Scattered
    """Of the rows whose logits are wanted."""

    def whole_of(self, own: BatchMeta) -> BatchMeta:
        """The whole step for the group of layers that `own` is for."""
        groups = zip((self.own, *self.own.others), (self.whole, *self.whole.others), strict=True)
        return next(whole for each, whole in groups if each is own)


class _RowPiece(NamedTuple):
    """Neighbouring rows of one sequence that a rank computes."""

    sequence: int
    first: int
    end: int
    context: int
    """Tokens of the sequence up to the last of these rows."""

    @property
    def size(self) -> int:
        return self.end - self.first


class _RankPart(NamedTuple):
    """What a rank computes of a step."""

    decodes: _RowNumbers
    """Sequences of one row each, which is of the same number."""
    pieces: list[_RowPiece]
    """Of the other sequences."""

    @property
    def rows(self) -> _RowNumbers:
        return np.concatenate((self.decodes, *(np.arange(piece.first, piece.end) for piece in self.pieces)))

    def of(self, step: BatchMeta) -> BatchMeta:
        """The part of `step`, but for its logits and inputs. Each piece is a sequence."""
        rows = torch.from_numpy(self.rows)
        sequences = np.array([piece.sequence for piece in self.pieces], dtype=np.int64)
        tables = torch.from_numpy(np.concatenate((self.decodes, sequences)))
        groups = [
            replace(
                self._sequences_of(step),
                block_tables=each.block_tables.index_select(0, tables),
                slots=each.slots.index_select(0, rows),
                positions=step.positions.index_select(0, rows),
                rotations=None if step.rotations is None else step.rotations.index_select(0, rows),
                every_row=False,
                others=(),
            )
            for each in (step, *step.others)
        ]
        return replace(groups[0], others=tuple(groups[1:]))

    def _sequences_of(self, step: BatchMeta) -> BatchMeta:
        decodes, contexts = len(self.decodes), step.context_lens.numpy()[self.decodes]
        sizes = [piece.size for piece in self.pieces]
        lengths = np.array([piece.context for piece in self.pieces], dtype=np.int32)
        starts = np.fromiter(accumulate(sizes, initial=decodes), dtype=np.int32)
        return replace(
            step,
            query_starts=torch.from_numpy(np.concatenate((np.arange(decodes, dtype=np.int32), starts))),
            context_lens=torch.from_numpy(np.concatenate((contexts, lengths))),
            num_decodes=decodes,
            prefills=tuple((piece.size, piece.context) for piece in self.pieces),
            max_query=max(sizes, default=1),
            max_context=max(int(contexts.max(initial=0)), int(lengths.max(initial=0))),
        )


def share_step(meta: BatchMeta, rank: int, ranks: int) -> SharedStep | None:
    """What `rank` computes of a step in main memory. None where a rank would have no row, or a row depends on others
    but by the keys and values of those before it in its sequence: all compute the whole step."""
    if not (meta.lasts is None and meta.encoded is None and meta.states is None):
        return None
    parts = [_RankPart(np.arange(each, meta.num_decodes, ranks), _pieces(meta, each, ranks)) for each in range(ranks)]
    rows = [part.rows for part in parts]
    if not all(map(len, rows)):
        return None
    owner, place = np.empty((2, len(meta.slots)), dtype=np.int64)
    for each, own in enumerate(rows):
        owner[own], place[own] = each, np.arange(len(own))
    wanted = meta.logits_rows.numpy()
    logits_rows = torch.from_numpy(place[wanted[owner[wanted] == rank]].astype(np.int32))
    part = parts[rank].of(meta)
    return SharedStep(
        rows=torch.from_numpy(rows[rank]),
        own=replace(
            part,
            logits_rows=logits_rows,
            inputs=None if meta.inputs is None else _own_inputs(meta.inputs, owner == rank, place),
            others=tuple(replace(each, logits_rows=logits_rows) for each in part.others),
        ),
        whole=meta,
        every_row=_scattered(owner, ranks),
        logits=_scattered(owner[wanted], ranks),
    )


def _pieces(meta: BatchMeta, rank: int, ranks: int) -> list[_RowPiece]:
    """Of the sequences that are no decodes."""
    pieces, before = [], meta.num_decodes
    for sequence, (rows, context) in enumerate(meta.prefills, start=meta.num_decodes):
        turn = (rank - sequence) % ranks
        for first, end in _zig_zag(rows, turn, ranks):
            pieces.append(_RowPiece(sequence, before + first, before + end, context - rows + end))
        before += rows
    return pieces


def _zig_zag(rows: int, turn: int, ranks: int) -> list[tuple[int, int]]:
    """The turn-th of 2 * ranks pieces and the turn-th from the end; one piece where they are neighbours."""
    cuts = [rows * cut // (2 * ranks) for cut in range(2 * ranks + 1)]
    front, back = (cuts[turn], cuts[turn + 1]), (cuts[-2 - turn], cuts[-1 - turn])
    both = [(front[0], back[1])] if front[1] == back[0] else [front, back]
    return [(first, end) for first, end in both if end > first]


def _own_inputs(inputs: InputRows, mine: NDArray[np.bool_], place: _RowNumbers) -> InputRows:
    given = inputs.rows.numpy()
    here = mine[given]
    where = place[given[here]].astype(np.int32)
    return InputRows(torch.from_numpy(where), inputs.values[torch.from_numpy(here)])


def _scattered(owner: _RowNumbers, ranks: int) -> Scattered:
    """`owner`: the rank of each row; a rank has its rows in their order."""
    ends = np.cumsum(np.bincount(owner, minlength=ranks)).tolist()
    places = np.empty(len(owner), dtype=np.int64)
    places[np.argsort(owner, kind="stable")] = np.arange(len(owner))
    return Scattered(tuple(map(RowRange, (0, *ends[:-1]), ends)), torch.from_numpy(places))
