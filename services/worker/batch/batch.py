"""A step's work as a rank computes it: whose share is how much, and the rows that they come to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.worker.batch.draft_trees import DraftTrees
from services.worker.batch.pooled_rows import NO_POOLED_ROWS, PooledRows
from services.worker.batch.prompt_rows import LogitsRows, PromptRows
from services.worker.batch.rows import Indices, Int32s, Rows
from services.worker.ops.interface import InputRows
from services.worker.sampling.parameters import SamplingBatch
from shared.ids import SequenceId
from shared.messages.worker import SequenceWork


class BrokenPlan(Exception):
    """A plan that cannot be computed as it stands: a bug of whoever made it."""


class ScheduledWork(NamedTuple):
    """A plan's work, with whose it is."""

    work: tuple[SequenceWork, ...]
    seq_indices: Indices
    """[W]"""
    counts: Int32s
    """[W]"""
    samples: NDArray[np.bool_]
    """[W]"""
    speculates: Int32s
    """[W] tokens that may be drafted, as far as context and blocks have room for them."""

    @property
    def speculating(self) -> Indices:
        """The numbers of those that may draft."""
        return np.flatnonzero(self.speculates)


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """What was drafted for each of P sequences.

    Each draft is certain, given what is known and the key of its position: a proposer that has a distribution draws
    from it by that key, and drafts what the model draws wherever the two have one winner (`sampling.races`).
    """

    tokens: Int32s | Tensor
    """[P, K] what lies behind a row's count means nothing. A tensor where the host does not know them yet."""
    counts: Int32s
    """[P] number of drafts of each sequence; of a path, never more than requested."""
    parents: Int32s | None = None
    """[P, K] of trees the row that each draft follows, see `TreeRows`; None: each follows the one before."""

    @classmethod
    def none(cls, sequences: int) -> DraftTokens:
        """Drafts of so many sequences, none of which has any."""
        return cls(np.zeros((sequences, 0), dtype=np.int32), np.zeros(sequences, dtype=np.int32))

    def known(self) -> Int32s:
        """The tokens on the host; waits for a device that has them."""
        return self.tokens.cpu().numpy() if isinstance(self.tokens, Tensor) else self.tokens

    def on_host(self) -> DraftTokens:
        """These drafts with their tokens on the host; see `known`."""
        return replace(self, tokens=self.known())

    def followed(self) -> Int32s:
        """[P, K] the row that each draft follows, of trees or not."""
        if self.parents is not None:
            return self.parents
        return np.broadcast_to(np.arange(self.tokens.shape[1], dtype=np.int32), self.tokens.shape)

    def without_branches(self, which: NDArray[np.bool_]) -> DraftTokens:
        """Only the first path of these [P] sequences."""
        if self.parents is None:
            return self
        straight = self.parents == np.arange(self.parents.shape[1])
        first = np.minimum(np.logical_and.accumulate(straight, axis=1).sum(axis=1), self.counts)
        return replace(self, counts=np.where(which, first, self.counts).astype(np.int32))

    def among(self, sequences: int, which: Indices) -> DraftTokens:
        """The same of the sequences of these numbers [P], among so many that have no other drafts."""
        tokens, parents = np.zeros((2, sequences, self.tokens.shape[1]), dtype=np.int32)
        counts = np.zeros(sequences, dtype=np.int32)
        tokens[which], parents[which], counts[which] = self.known(), self.followed(), self.counts
        return DraftTokens(tokens, counts, None if self.parents is None else parents)

    def beside(self, other: DraftTokens) -> DraftTokens:
        """The drafts of both; no sequence has drafts in both."""
        width = max(self.tokens.shape[1], other.tokens.shape[1])
        tokens = np.zeros((len(self.counts), width), dtype=np.int32)
        parents = np.zeros_like(tokens)
        for drafts in (self, other):
            rows, each = drafts.counts > 0, drafts.tokens.shape[1]
            tokens[rows, :each] = drafts.known()[rows]
            parents[rows, :each] = drafts.followed()[rows]
        straight = self.parents is None and other.parents is None
        return DraftTokens(tokens, self.counts + other.counts, None if straight else parents)

    def message(self, width: int, *, trees: bool) -> Int32s:
        """[P, 1 + width] counts and tokens, to be sent to other ranks; where there are `trees` [P, 1 + 2 * width],
        parents behind them."""
        numbers = np.zeros((len(self.counts), 1 + width * (1 + trees)), dtype=np.int32)
        numbers[:, 0] = self.counts
        most = min(width, self.tokens.shape[1])
        numbers[:, 1 : 1 + most] = self.known()[:, :most]
        if trees:
            numbers[:, 1 + width : 1 + width + most] = self.followed()[:, :most]
        return numbers

    @classmethod
    def from_message(cls, numbers: Int32s, *, trees: bool) -> DraftTokens:
        """Out of what `message` made."""
        width = (numbers.shape[1] - 1) // (1 + trees)
        return cls(numbers[:, 1 : 1 + width], numbers[:, 0], numbers[:, 1 + width :] if trees else None)


class StateCopies(NamedTuple):
    """(index of a sequence, checkpoint) of states that are copied, see `StepPlan`."""

    restored: tuple[tuple[int, int], ...] = ()
    checkpoints: tuple[tuple[int, int], ...] = ()


NO_COPIES = StateCopies()


class EncodedRows(NamedTuple):
    """The encoded rows of a step, on the host."""

    tables: Int32s
    """[n, width] the blocks of the rows that each row of the step attends to."""
    lengths: Int32s
    """[n] how many rows these are; 0: none, as of requests that brought none."""
    values: Tensor | None
    """[k, hidden] rows whose keys and values this step writes; None: those of all its sequences lie there."""
    slots: Int32s
    """[k] where each goes."""
    owners: Indices
    """[k] the indices of their sequences."""

    def written(self) -> EncodedRows:
        """The same for a step behind the one that writes."""
        return self if self.values is None else self._replace(values=None, slots=self.slots[:0], owners=self.owners[:0])


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's rows, whose logits are wanted, and who draws."""

    rows: Rows
    """[n]"""
    logits_rows: Int32s
    """[R] in the plan's order."""
    sampled: tuple[SequenceId, ...]
    """[Q] in the plan's order."""
    sampled_indices: Indices
    """[Q]"""
    drafted: Int32s
    """[Q] drafts of each, beside its last token: it has one more row of logits than that. With `trees` those of all
    branches."""
    choices: SamplingBatch | None
    """Of the R rows of logits that are drawn from, each sequence's together. None where nothing is sampled."""
    drawn_rows: Int32s
    """[R]"""
    prompts: PromptRows
    """What is told of prompts. Where there is any, `logits_rows` are those of `merged`, in rising order."""
    merged: LogitsRows | None = None
    pooled: PooledRows = NO_POOLED_ROWS
    """Rows whose hidden states become vectors of prompts."""
    copies: StateCopies = NO_COPIES
    """Of states, before and behind the step."""
    shifts: Int32s | None = None
    """[3, n] how far each axis of a row's position is ahead of its place, on the host; None: positions are places."""
    lasts: Int32s | None = None
    """[n] the last place that each row sees, on the host; None: its own."""
    inputs: InputRows | None = None
    """Rows that begin as the client gave them, on the host; None: there are none."""
    encoded: EncodedRows | None = None
    """What its rows attend to beside their sequences, on the host; None: the model has no such layers."""
    trees: DraftTrees | None = None
    """None: all drafts of a sequence follow each other."""

    @property
    def levels(self) -> Int32s:
        """[Q] drafts that may be accepted of each."""
        return self.drafted if self.trees is None else self.trees.levels

    @property
    def first_drawn(self) -> Int32s:
        """[Q] which of the R rows is the first of each sequence."""
        return first_rows(self.drafted)

    def last_rows(self, counts: Int32s) -> Int32s:
        """[Q] the row that the last of `counts` [Q] tokens of each sequence was drawn behind."""
        return self.drawn_rows[self.first_drawn + counts - 1] if len(counts) else self.drawn_rows

    @property
    def drawn_at_most(self) -> int:
        """Q * (K + 1), K being the most drafts that one of the sequences has."""
        return len(self.sampled) * (int(self.drafted.max(initial=0)) + 1)


class DecodeBatch(NamedTuple):
    """The R rows of a step in which each of Q sequences decodes: one of its last token, and one of each draft."""

    sampled: tuple[SequenceId, ...]
    """[Q] in the plan's order."""
    sampled_indices: Indices
    """[Q]"""
    drafted: Int32s
    """[Q] drafts of each. They follow each other."""
    seq_indices: Indices
    """[R] whose row each is."""
    positions: Int32s
    """[R]"""
    choices: SamplingBatch
    """[R]"""

    @property
    def levels(self) -> Int32s:
        """See `Batch.levels`."""
        return self.drafted

    @property
    def first_drawn(self) -> Int32s:
        """See `Batch.first_drawn`."""
        return first_rows(self.drafted)

    def rows_of(self, which: NDArray[np.bool_]) -> Indices:
        """All rows of these [Q] sequences."""
        return np.flatnonzero(np.repeat(which, self.drafted + 1))


def first_rows(drafted: Int32s) -> Int32s:
    """[Q] the first row of each sequence, where each has one more than it has drafts."""
    rows = drafted + 1
    first: Int32s = np.cumsum(rows, dtype=np.int32) - rows
    return first
