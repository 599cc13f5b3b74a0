"""What operations are asked of drafts: which are accepted, and where keys and values of their branches go."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DraftAttempt(NamedTuple):
    """What a step drew for Q sequences, of which some try drafts: for each a row behind its last token, and one behind
    every draft, all of a sequence's together, R in all. Tensors are contiguous and on the device."""

    drawn: Tensor
    """int64 [R]"""
    ids: Tensor
    """int32 [n] the tokens of all of the step's rows."""
    rows: Tensor | None
    """int32 [R] which of those each was drawn behind; None: the first R."""
    first: Tensor
    """int32 [Q] which of the R is the first of each sequence."""
    counts: Tensor
    """int32 [Q] drafts of each."""
    max_drafts: int
    """The greatest of `counts`, 1 at the least."""


class SlotCopies(NamedTuple):
    """Slots (block id * block_size + offset) whose keys and values go to others, too. No slot is in both."""

    sources: Tensor
    """int32 [c]"""
    targets: Tensor
    """int32 [c], each once."""
