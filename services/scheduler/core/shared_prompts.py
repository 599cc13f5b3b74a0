"""Prompt blocks that are being computed just now, and who had better wait for them than compute the same.

Choices of one request (`n` > 1) come with equal prompts within a millisecond; so do many users of one system prompt.
The first computes, the others step aside until the plan that computes what they share has been issued.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from services.scheduler.core.sequence import Sequence
from shared.blocks import BLOCK_SIZE, BlockHash
from shared.ids import SequenceId

MOST_WAITS = 8
"""Times that one sequence waits for others; then it computes."""


@dataclass(slots=True)
class _Owned:
    """What one sequence is computing: its blocks from `next` to `end`."""

    next: int
    end: int
    waiting: list[tuple[int, Sequence]] = field(default_factory=list)
    """Each with the number of blocks that it waits for."""


class SharedPrompts:
    """Owns which prefilling sequence computes which full blocks, and who waits for that."""

    def __init__(self) -> None:
        self._computing: dict[BlockHash, Sequence] = {}
        self._owned: dict[SequenceId, _Owned] = {}

    @property
    def waiting(self) -> int:
        """How many wait."""
        return sum(1 for owned in self._owned.values() for _, other in owned.waiting if other.phase == "seeking")

    def begin(self, sequence: Sequence) -> None:
        """It will compute all of its tokens, from the first block that is not indexed."""
        first, end = sequence.indexed, len(sequence.hashes)
        if first >= end:
            return
        self._owned[sequence.id] = _Owned(first, end)
        for hash_ in sequence.hashes[first:end]:
            self._computing.setdefault(hash_, sequence)

    def wait(self, sequence: Sequence, cached: int) -> bool:
        """Whether somebody computes the first full block that `sequence` lacks; then it is told by `progressed`."""
        wanted = sequence.hashes[: sequence.reusable // BLOCK_SIZE]
        if cached >= len(wanted) or sequence.awaited >= MOST_WAITS:
            return False
        owner = self._computing.get(wanted[cached])
        if owner is None:
            return False
        sequence.awaited += 1
        self._owned[owner.id].waiting.append((_common(owner.hashes, wanted, cached), sequence))
        return True

    def progressed(self, sequence: Sequence) -> list[Sequence]:
        """More of its blocks may be indexed: who waited for those."""
        owned = self._owned.get(sequence.id)
        if owned is None:
            return []
        indexed = sequence.indexed
        self._forget(sequence, owned, indexed)
        served = [other for blocks, other in owned.waiting if blocks <= indexed]
        owned.waiting = [(blocks, other) for blocks, other in owned.waiting if blocks > indexed]
        if owned.next >= owned.end:
            del self._owned[sequence.id]
        return _still_there(served)

    def left(self, sequence: Sequence) -> list[Sequence]:
        """It computes nothing any more: who waited for it."""
        owned = self._owned.pop(sequence.id, None)
        if owned is None:
            return []
        self._forget(sequence, owned, owned.end)
        return _still_there([other for _, other in owned.waiting])

    def _forget(self, sequence: Sequence, owned: _Owned, end: int) -> None:
        for hash_ in sequence.hashes[owned.next : end]:
            if self._computing.get(hash_) is sequence:
                del self._computing[hash_]
        owned.next = max(owned.next, end)


def _common(ours: list[BlockHash], theirs: list[BlockHash], known: int) -> int:
    """Leading blocks that are equal; the first `known` + 1 are. A block's hash names all before it, too."""
    end = min(len(ours), len(theirs))
    return bisect_left(range(end), True, lo=known + 1, key=lambda place: ours[place] != theirs[place])


def _still_there(waited: list[Sequence]) -> list[Sequence]:
    """Who has ended meanwhile waits for nothing."""
    return [sequence for sequence in waited if sequence.phase == "seeking"]
