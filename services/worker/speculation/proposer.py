"""Who drafts: the interface between the model runner and the methods of speculation. Knows no method.

A proposer drafts for whole batches and keeps what it needs of each sequence by its slot. It may be wrong at will: what
it drafts costs time, never correctness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.worker.ops import BatchMeta
from services.worker.sampling.parameters import Choices
from services.worker.shortfall import Shortfall

Int32s = NDArray[np.int32]
Slots = NDArray[np.intp]


class Histories(Protocol):
    """What proposers may know of the sequences: arrays by slot, read while a call lasts, and never written."""

    @property
    def tokens(self) -> Int32s:
        """[slots, width]"""

    @property
    def lengths(self) -> Int32s:
        """[slots] tokens known; the last one is drawn, its keys and values are not computed yet."""

    @property
    def block_tables(self) -> Int32s:
        """[slots, blocks]"""

    def choose(self, slots: Slots, ahead: Int32s | int) -> Choices:
        """How the tokens are drawn that come `ahead` tokens behind the known ones."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The sequences of one step that may speculate."""

    slots: Slots
    """[P] different ones."""
    most: Int32s
    """[P] tokens that may be drafted for each; 0 for some."""
    histories: Histories
    shortfall: Shortfall | None = None
    """[P] by how much they may be shorter than `histories` says, which knows nothing of the tokens there then. Only
    who `drafts_ahead` is asked so."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """What was drafted for each sequence asked about.

    Each draft is certain, given what is known and the random number of its position: a proposer that has a distribution
    draws from it by that number, and drafts what the model draws wherever the two cumulate alike.
    """

    tokens: Int32s | Tensor
    """[P, K] what lies behind a row's count means nothing. A tensor where the host does not know them yet."""
    counts: Int32s
    """[P] never more than asked for."""

    @classmethod
    def none(cls, asked: Asked) -> Drafts:
        """For whoever has nothing to say."""
        return cls(np.zeros((len(asked.slots), 0), dtype=np.int32), np.zeros(len(asked.slots), dtype=np.int32))

    def known(self) -> Int32s:
        """The tokens on the host; waits for a device that has them."""
        return self.tokens.cpu().numpy() if isinstance(self.tokens, Tensor) else self.tokens

    def on_host(self) -> Drafts:
        return Drafts(self.known(), self.counts)

    def message(self, width: int) -> Int32s:
        """[P, 1 + width] counts and tokens, to be told to other ranks."""
        numbers = np.zeros((len(self.counts), 1 + width), dtype=np.int32)
        numbers[:, 0] = self.counts
        most = min(width, self.tokens.shape[1])
        numbers[:, 1 : 1 + most] = self.known()[:, :most]
        return numbers

    @classmethod
    def told(cls, numbers: Int32s) -> Drafts:
        """Out of a message."""
        return cls(numbers[:, 1:], numbers[:, 0])


@dataclass(frozen=True, slots=True)
class Computed:
    """A step that the model has computed, and what came of it."""

    row_slots: Slots
    """[n] whose row each is."""
    positions: Int32s
    """[n]"""
    kv_slots: Int32s
    """[n] block id * BLOCK_SIZE + offset"""
    meta: BatchMeta
    """The same for the device. It holds rows of drafts that were rejected, too."""
    features: Tensor | None
    """[n, hidden] the model's last hidden state, normed, of each row; None unless asked for."""
    sampled_slots: Slots
    """[Q] the sequences that have got tokens."""
    last_rows: Int32s | Tensor
    """[Q] the row that each one's last token was drawn behind; a tensor where the host does not know how many drafts
    stand."""
    following: Callable[[], Tensor]
    """[n] the token behind each row, on the device, int32; what is behind the last row of a sequence that drew nothing
    means nothing, as what is behind rejected drafts."""


class Drafting(NamedTuple):
    """What every rank must know of the proposer, also those that have none."""

    most: int = 0
    """Tokens that it drafts in one step at the most."""
    features: bool = False
    """Whether it wants `Computed.features`."""


NO_DRAFTING = Drafting()


class Proposer(Protocol):
    """One method of drafting. Lives on the rank that draws; used from the compute thread."""

    def propose(self, asked: Asked) -> Drafts:
        """Drafts, as many as it likes up to `asked.most` for each sequence."""

    def observe(self, computed: Computed) -> None:
        """A step is over. Called for every step that computed anything, whether or not somebody speculated."""

    def took(self, slot: int, computed: int, histories: Histories) -> None:
        """A new sequence lies in `slot`, `computed` tokens of which were computed before."""

    def loaded(self, blocks: Int32s) -> None:
        """These blocks hold from here on what somebody else computed."""

    def clear(self) -> None:
        """Every sequence is forgotten."""


@runtime_checkable
class DraftsAhead(Protocol):
    """A proposer that reads no token of a sequence but what it observes on the device: it can be asked before the host
    knows how many of its last drafts stand."""

    drafts_ahead: Literal[True]


class WithoutMemory:
    """What a proposer does between its drafts that keeps nothing of its own: nothing."""

    __slots__ = ()

    def observe(self, computed: Computed) -> None:
        pass

    def took(self, slot: int, computed: int, histories: Histories) -> None:
        pass

    def loaded(self, blocks: Int32s) -> None:
        pass

    def clear(self) -> None:
        pass


class FirstThatDrafts:
    """Several proposers, by rank: each sequence gets the drafts of the first one that has any for it.

    Tokens that a grammar forces go before guesses that way.
    """

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self._proposers = tuple(proposers)

    def propose(self, asked: Asked) -> Drafts:
        first, *others = self._proposers
        drafts = first.propose(asked)
        for proposer in others:
            left = np.where(drafts.counts > 0, 0, asked.most).astype(np.int32)
            if not left.any():
                break
            more = proposer.propose(replace(asked, most=left))
            drafts = _beside(drafts, more) if drafts.tokens.shape[1] else more
        return drafts

    def observe(self, computed: Computed) -> None:
        for proposer in self._proposers:
            proposer.observe(computed)

    def took(self, slot: int, computed: int, histories: Histories) -> None:
        for proposer in self._proposers:
            proposer.took(slot, computed, histories)

    def loaded(self, blocks: Int32s) -> None:
        for proposer in self._proposers:
            proposer.loaded(blocks)

    def clear(self) -> None:
        for proposer in self._proposers:
            proposer.clear()


def _beside(first: Drafts, second: Drafts) -> Drafts:
    """Each row is whichever has drafts there; only one of the two does."""
    width = max(first.tokens.shape[1], second.tokens.shape[1])
    tokens = np.zeros((len(first.counts), width), dtype=np.int32)
    tokens[:, : first.tokens.shape[1]] = first.known()
    rows = second.counts > 0
    tokens[rows, : second.tokens.shape[1]] = second.known()[rows]
    return Drafts(tokens, first.counts + second.counts)
