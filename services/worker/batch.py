"""A step's work as a rank computes it: whose share is how much, and the rows that they come to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.worker.rows import Int32s, Rows, Slots
from services.worker.sampling.parameters import Choices
from services.worker.sampling.prompt_rows import LogitsRows, PromptRows
from shared.ids import SequenceId
from shared.messages.worker import Work


class BrokenPlan(Exception):
    """A plan that cannot be computed as it stands: a bug of whoever made it."""


class Shares(NamedTuple):
    """A plan's work, with whose it is."""

    work: tuple[Work, ...]
    slots: Slots
    """[W]"""
    counts: Int32s
    """[W]"""
    samples: NDArray[np.bool_]
    """[W]"""
    speculates: Int32s
    """[W] tokens that may be drafted, as far as context and blocks have room for them."""

    @property
    def speculating(self) -> Slots:
        """The numbers of those that may draft."""
        return np.flatnonzero(self.speculates)


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's rows, whose logits are wanted, and who draws."""

    rows: Rows
    """[n]"""
    logits_rows: Int32s
    """[R] in the plan's order."""
    sampled: tuple[SequenceId, ...]
    """[Q] in the plan's order."""
    sampled_slots: Slots
    """[Q]"""
    drafted: Int32s
    """[Q] drafts of each, beside its last token: it has one more row of logits than that."""
    choices: Choices | None
    """Of the R rows of logits that are drawn from, each sequence's together. None where nothing is sampled."""
    drawn_rows: Int32s
    """[R]"""
    prompts: PromptRows
    """What is told of prompts. Where there is any, `logits_rows` are those of `merged`, in rising order."""
    merged: LogitsRows | None = None

    @property
    def first_drawn(self) -> Int32s:
        """[Q] which of the R rows is the first of each sequence."""
        rows = self.drafted + 1
        first: Int32s = np.cumsum(rows, dtype=np.int32) - rows
        return first

    def last_rows(self, counts: Int32s) -> Int32s:
        """[Q] the row that the last of `counts` [Q] tokens of each sequence was drawn behind."""
        return self.drawn_rows[self.first_drawn + counts - 1] if len(counts) else self.drawn_rows

    @property
    def drawn_at_most(self) -> int:
        """Q * (K + 1), K being the most drafts that one of the sequences has."""
        return len(self.sampled) * (int(self.drafted.max(initial=0)) + 1)
