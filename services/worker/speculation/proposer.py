"""The interface between the runners of a rank and the methods of drafting. Knows no method.

A proposer drafts for whole batches and keeps what it needs of each sequence by its index. Wrong drafts
cost time, never correctness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.worker.batch.batch import DraftTokens
from services.worker.batch.draft_trees import TreeShape
from services.worker.ops.interface import BatchMeta
from services.worker.sampling.parameters import SamplingBatch
from services.worker.sampling.random_numbers import RejectedDrafts
from shared.messages.worker import NewSequence

Int32s = NDArray[np.int32]
Indices = NDArray[np.intp]

HISTORY_WINDOW = 4096
"""Tokens before the end of a sequence that are looked through for what to draft: bounds the cost for each."""


class SequenceHistories(Protocol):
    """What proposers may know of the sequences: arrays by their index, read while a call lasts, and never written."""

    @property
    def tokens(self) -> Int32s:
        """[sequences, width]"""

    @property
    def lengths(self) -> Int32s:
        """[sequences] tokens known; the last one is drawn, its keys and values are not computed yet."""

    @property
    def block_tables(self) -> Int32s:
        """[sequences, blocks]"""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""

    def sampling_batch(self, seq_indices: Indices, ahead: Int32s | int) -> SamplingBatch:
        """How the tokens are drawn that come `ahead` tokens behind the known ones."""


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """The sequences of one step that may speculate."""

    seq_indices: Indices
    """[P] which sequences, each once."""
    limits: Int32s
    """[P] tokens that may be drafted for each; may be 0."""
    histories: SequenceHistories
    rejected: RejectedDrafts | None = None
    """[P] by how much they may be shorter than `histories` says, which knows nothing of the tokens there then. Only
    given to proposers that draft ahead."""


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step that the model has computed, and what came of it."""

    seq_indices: Indices
    """[n] whose row each is."""
    positions: Int32s
    """[n] position of each row."""
    kv_slots: Int32s
    """[n] block id * block_size + offset"""
    meta: BatchMeta
    """The batch's metadata on the device. It also has the rows of rejected drafts."""
    features: Tensor | None
    """[n, hidden] the model's last hidden state, normed, of each row; None unless asked for."""
    sampled_indices: Indices
    """[Q] the sequences that have got tokens."""
    last_rows: Int32s | Tensor
    """[Q] the row that each one's last token was drawn behind; a tensor where the host does not know how many drafts
    are accepted."""
    following: Callable[[], Tensor]
    """[n] the token behind each row, on the device, int32; what is behind the last row of a sequence that drew nothing
    means nothing, as what is behind rejected drafts."""


class DraftSettings(NamedTuple):
    """What every rank must know of the proposer, also those that have none."""

    max_tokens: int = 0
    """Tokens that it drafts in one step at the most."""
    features: bool = False
    """Whether it wants `ComputedStep.features`."""
    tree: TreeShape | None = None
    """None: it drafts no trees."""

    @property
    def rows_per_draft(self) -> int:
        """See `Backend.rows_per_draft`."""
        return 1 if self.tree is None else self.tree.rows_per_draft

    def width(self, limit: int) -> int:
        """Drafts of one sequence at the most, where `limit` is the greatest of a request."""
        return limit if self.tree is None else max(limit, self.tree.drafts)


NO_DRAFTS = DraftSettings()


class Proposer(Protocol):
    """One method of drafting. Lives on the rank that draws; used from the compute thread."""

    def propose(self, request: DraftRequest) -> DraftTokens:
        """Drafts, as many as it likes up to `request.limits` for each sequence."""

    def observe(self, computed: ComputedStep) -> None:
        """Called when a step is over: for every step that computed anything, whether or not any sequence had drafts."""

    def start_sequence(self, seq_index: int, new: NewSequence, histories: SequenceHistories) -> None:
        """Called when a `new` sequence lies in `seq_index`."""

    def end_sequence(self, seq_index: int, histories: SequenceHistories) -> None:
        """Called when the sequence in `seq_index` is about to be forgotten."""

    def forget_blocks(self, blocks: Int32s) -> None:
        """Called when these blocks hold, from here on, what another engine computed."""

    def clear(self) -> None:
        """Removes every sequence."""


@runtime_checkable
class DraftsAhead(Protocol):
    """A proposer that reads no token of a sequence but what it observes on the device: it can be asked before the host
    knows how many of its last drafts are accepted."""

    drafts_ahead: Literal[True]


class StatelessProposer:
    """A proposer that keeps nothing of its own between two steps."""

    __slots__ = ()

    def observe(self, computed: ComputedStep) -> None:
        """Nothing is kept of steps."""

    def start_sequence(self, seq_index: int, new: NewSequence, histories: SequenceHistories) -> None:
        """Nothing is kept of sequences."""

    def end_sequence(self, seq_index: int, histories: SequenceHistories) -> None:
        """Nothing is kept of sequences."""

    def forget_blocks(self, blocks: Int32s) -> None:
        """Nothing is kept of blocks."""

    def clear(self) -> None:
        """There is nothing to forget."""


class ProposerChain:
    """Several proposers in order: each sequence gets the drafts of the first one that has any for it.

    Tokens that a grammar forces go before guesses that way.
    """

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self._proposers = tuple(proposers)

    def propose(self, request: DraftRequest) -> DraftTokens:
        """The first proposer's drafts, and those of the next ones for sequences that have none yet."""
        first, *others = self._proposers
        drafts = first.propose(request)
        for proposer in others:
            left = np.where(drafts.counts > 0, 0, request.limits).astype(np.int32)
            if not left.any():
                break
            more = proposer.propose(replace(request, limits=left))
            drafts = drafts.beside(more) if drafts.tokens.shape[1] else more
        return drafts

    def observe(self, computed: ComputedStep) -> None:
        """Every proposer observes."""
        for proposer in self._proposers:
            proposer.observe(computed)

    def start_sequence(self, seq_index: int, new: NewSequence, histories: SequenceHistories) -> None:
        """Every proposer starts it."""
        for proposer in self._proposers:
            proposer.start_sequence(seq_index, new, histories)

    def end_sequence(self, seq_index: int, histories: SequenceHistories) -> None:
        """Every proposer ends it."""
        for proposer in self._proposers:
            proposer.end_sequence(seq_index, histories)

    def forget_blocks(self, blocks: Int32s) -> None:
        """Every proposer forgets them."""
        for proposer in self._proposers:
            proposer.forget_blocks(blocks)

    def clear(self) -> None:
        """Every proposer forgets."""
        for proposer in self._proposers:
            proposer.clear()
