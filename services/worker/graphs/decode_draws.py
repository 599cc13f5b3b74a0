"""How the rows of a step of decodes are drawn: what the library does of it, and what it leaves to the sampler.

The library draws from logits as `services.worker.sampling.logits_processors` would change them, and finds their
log-probabilities. Masks of grammars come behind the forward pass. Left are what foreign code makes, thinking that has
to end, bad words, and log-probabilities of named tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.worker.batch.batch import DecodeBatch
from services.worker.batch.rows import Indices, Int32s
from services.worker.batch.sequences import SequenceTable
from services.worker.ops.native.draw_structures import CHANGES, MAX_LIKELIEST, NativeDecode
from services.worker.sampling.masks import TokenMask
from services.worker.sampling.parameters import Feature, PaddedLists, SamplingBatch

Flags = NDArray[np.bool_]

_DRAWN_BY_SAMPLER = Feature.BAD_WORDS | Feature.THINKING | Feature.LOGPROB_IDS
"""What the library knows nothing of: the sampler draws for sequences with any of it."""
_CHANGED = Feature.ALLOWED | Feature.BIAS | Feature.MIN_TOKENS | Feature.PENALTIES
"""What the library changes logits by, beside masks of grammars."""


class RowSubset(NamedTuple):
    """All rows of some of a step's sequences."""

    rows: Indices
    """[A] of the step's."""
    places: Indices
    """[P] of the step's sequences."""
    seq_indices: Indices
    """[P]"""
    drafted: Int32s
    """[P]"""

    @classmethod
    def of(cls, rows: DecodeBatch, which: Flags | None) -> RowSubset | None:
        """`which` [Q]; None where it is nobody."""
        if which is None or not which.any():
            return None
        places = np.flatnonzero(which)
        return cls(rows.rows_of(which), places, rows.sampled_indices[places], rows.drafted[places])

    def of_step(self, mask: TokenMask) -> TokenMask:
        """A mask of these rows, as one of the step's."""
        return TokenMask(self.rows[mask.rows], mask.bits)

    def own(self, mask: TokenMask) -> TokenMask:
        """A mask of the step's rows, as one of these."""
        which = np.isin(mask.rows, self.rows)
        return TokenMask(np.searchsorted(self.rows, mask.rows[which]), mask.bits[which])


class DecodeDraws:
    """The draws of a run of steps. Read by the library while one is computed."""

    def __init__(
        self, rows: DecodeBatch, sequences: SequenceTable, guided: Flags | None, processed: Flags | None
    ) -> None:
        """`guided` and `processed` [Q]: who has a grammar, and who asks for a logits processor; None: nobody."""
        self._rows, self._sequences = rows, sequences
        choices, table = rows.choices, rows.choices.table
        self.masked = RowSubset.of(rows, guided)
        """Those of sequences with a grammar."""
        self.left = RowSubset.of(rows, self._left(processed))
        """Those that the sampler draws."""
        self.left_choices = None if self.left is None else choices.of_rows(self.left.rows)
        by_row = choices.by_row
        if self.left is not None:
            by_row = by_row.copy()
            by_row[self.left.rows] = 0  # the cheapest draw, of what nobody looks at
        self._by_row = by_row
        self.reported = np.flatnonzero(by_row & int(Feature.LOGPROBS))
        """[L] rows whose log-probabilities the library finds."""
        self.counts = table.logprobs[choices.seq_indices[self.reported]]
        """[L] how many of the likeliest tokens each row reports."""
        changed = self.masked is not None or bool((by_row & int(_CHANGED)).any())
        self._changes = np.zeros(len(by_row), dtype=CHANGES) if changed else None
        self._kept: list[NDArray[np.generic]] = []
        """What the call points to."""

    def _left(self, processed: Flags | None) -> Flags | None:
        choices, first = self._rows.choices, self._rows.first_drawn
        left = processed
        if choices.features & (_DRAWN_BY_SAMPLER | Feature.LOGPROBS):
            many = (choices.by_row & int(Feature.LOGPROBS) != 0) & (
                choices.table.logprobs[choices.seq_indices] > MAX_LIKELIEST
            )
            beyond = np.logical_or.reduceat(many | (choices.by_row & int(_DRAWN_BY_SAMPLER) != 0), first)
            left = beyond if processed is None else beyond | processed
        return left

    def fill_in(self, call: NativeDecode, words: int) -> None:
        """What the library is asked for, of logits of so many words."""
        if self.left is not None:
            call.left = len(self.left.rows)
        call.halts = self.masked is not None
        if len(self.reported):
            call.logprobs.count, call.logprobs.rows = len(self.reported), self._address(self.reported)
            call.logprobs.likeliest = min(int(self.counts.max()), words)
        greedy = self._by_row & int(Feature.RANDOM) == 0
        if self._changes is None and greedy.all():
            return
        choices = self._rows.choices
        table, seq_indices = choices.table, choices.seq_indices
        call.seeds, call.outputs = self._address(table.seed[seq_indices]), self._address(choices.position)
        temperature = np.where(greedy, np.float32(0.0), table.temperature[seq_indices])
        call.draws.temperature, call.draws.top_k = self._address(temperature), self._address(table.top_k[seq_indices])
        call.draws.top_p, call.draws.min_p = (self._address(p[seq_indices]) for p in (table.top_p, table.min_p))
        if self._changes is not None:
            self._fill_changes(self._changes, choices)
            call.draws.changes = self._address(self._changes)

    def put(self, mask: TokenMask | None) -> None:
        """What grammars allow in the step that is computed, of its rows."""
        assert self._changes is not None, "somebody has a grammar"
        self._changes["mask"] = 0
        if mask is not None:
            self._changes["mask"][mask.rows] = _addresses(mask.bits, np.arange(len(mask.bits)))

    def _fill_changes(self, changes: NDArray[np.void], choices: SamplingBatch) -> None:
        table = choices.table
        if len(rows := self._asking(Feature.ALLOWED)):
            changes["allowed"][rows] = self._of_sequences(table.allowed, choices.seq_indices[rows])
        if len(rows := self._asking(Feature.BIAS)):
            self._point_to(changes, rows, "bias_tokens", "biases", table.bias_tokens)
            self._point_to(changes, rows, "bias_values", "biases", table.bias_values)
        if len(rows := self._asking(Feature.MIN_TOKENS)):
            self._point_to(changes, rows, "stops", "stop_count", table.stops)
        if len(rows := self._asking(Feature.PENALTIES)):
            seq_indices = choices.seq_indices[rows]
            prompts = self._sequences.prompt_lengths[seq_indices]
            changes["held"][rows] = self._of_sequences(self._sequences.tokens, seq_indices)
            changes["prompt_length"][rows], changes["held_length"][rows] = prompts, prompts + choices.position[rows]
            for name in ("presence", "frequency", "repetition"):
                changes[name][rows] = getattr(table, name)[seq_indices]

    def _asking(self, feature: Feature) -> Indices:
        return np.flatnonzero(self._by_row & int(feature))

    def _point_to(self, changes: NDArray[np.void], rows: Indices, items: str, count: str, lists: PaddedLists) -> None:
        seq_indices = self._rows.choices.seq_indices[rows]
        changes[items][rows] = self._of_sequences(lists.values, seq_indices)
        changes[count][rows] = lists.lengths(seq_indices)

    def _of_sequences(self, table: NDArray[np.generic], seq_indices: Indices) -> NDArray[np.uintp]:
        """Where each one's row of `table` is, which may be replaced by a wider one."""
        self._kept.append(table)
        return _addresses(table, seq_indices)

    def _address(self, array: NDArray[np.generic]) -> int:
        self._kept.append(array)
        address: int = array.ctypes.data
        return address


def _addresses(table: NDArray[np.generic], rows: Indices) -> NDArray[np.uintp]:
    return (table.ctypes.data + rows * table.strides[0]).astype(np.uintp)
