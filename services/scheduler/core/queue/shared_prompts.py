"""Prompt blocks that are being computed, and the sequences that wait for them instead of computing them too.

Choices of one request (`n` > 1) come with equal prompts within a millisecond; so do many users of one system prompt.
The first computes, and the others are set aside until the plan that computes what they share has been issued.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

from services.scheduler.core.sequence import Sequence
from shared.blocks import BlockHash
from shared.ids import SequenceId

MAX_WAITS = 8
"""Times that one sequence waits for others; then it computes."""


@dataclass(slots=True)
class _Prefill:
    """The blocks that one sequence is computing: from `next` to `end`."""

    next: int
    end: int
    waiting: list[tuple[int, Sequence]] = field(default_factory=list)
    """Each with the number of blocks that it waits for."""


class SharedPrompts:
    """Owns which prefilling sequence computes which full blocks, and which sequences wait for them."""

    def __init__(self, share_at: Callable[[Sequence, int], None]) -> None:
        """`share_at`: is told who computes blocks that others wait for, and how many."""
        self._share_at = share_at
        self._computing: dict[BlockHash, Sequence] = {}
        self._prefills: dict[SequenceId, _Prefill] = {}

    @property
    def waiting(self) -> int:
        """How many sequences wait for another one's blocks."""
        return sum(1 for each in self._prefills.values() for _, other in each.waiting if other.phase == "seeking")

    def start(self, sequence: Sequence) -> None:
        """Records that the sequence will compute its tokens, from the first block that is not indexed."""
        first, end = sequence.blocks.indexed, len(sequence.tokens.hashes)
        if first >= end:
            return
        self._prefills[sequence.id] = _Prefill(first, end)
        for hash_ in sequence.tokens.hashes[first:end]:
            self._computing.setdefault(hash_, sequence)

    def wait(self, sequence: Sequence, cached: int) -> bool:
        """Whether another sequence computes the first full block that this one lacks, of which `cached` blocks are
        there; then it waits until `progress` or `stop` returns it."""
        wanted = sequence.tokens.hashes[: sequence.reusable_blocks]
        if cached >= len(wanted) or sequence.prompt_waits >= MAX_WAITS:
            return False
        owner = self._computing.get(wanted[cached])
        if owner is None:
            return False
        sequence.prompt_waits += 1
        common = _common(owner.tokens.hashes, wanted, cached)
        self._prefills[owner.id].waiting.append((common, sequence))
        self._share_at(owner, common)
        return True

    def progress(self, sequence: Sequence) -> list[Sequence]:
        """More blocks of `sequence` may be indexed: who waited for those."""
        prefill = self._prefills.get(sequence.id)
        if prefill is None:
            return []
        indexed = sequence.blocks.indexed
        self._forget(sequence, prefill, indexed)
        served = [other for blocks, other in prefill.waiting if blocks <= indexed]
        prefill.waiting = [(blocks, other) for blocks, other in prefill.waiting if blocks > indexed]
        if prefill.next >= prefill.end:
            del self._prefills[sequence.id]
        return _still_waiting(served)

    def stop(self, sequence: Sequence) -> list[Sequence]:
        """Records that the sequence computes nothing any more; returns the sequences that waited for it."""
        prefill = self._prefills.pop(sequence.id, None)
        if prefill is None:
            return []
        self._forget(sequence, prefill, prefill.end)
        return _still_waiting([other for _, other in prefill.waiting])

    def _forget(self, sequence: Sequence, prefill: _Prefill, end: int) -> None:
        for hash_ in sequence.tokens.hashes[prefill.next : end]:
            if self._computing.get(hash_) is sequence:
                del self._computing[hash_]
        prefill.next = max(prefill.next, end)


def _common(ours: list[BlockHash], theirs: list[BlockHash], known: int) -> int:
    """Leading blocks that are equal; the first `known` + 1 are. A block's hash names all before it, too."""
    end = min(len(ours), len(theirs))
    return bisect_left(range(end), True, lo=known + 1, key=lambda place: ours[place] != theirs[place])


def _still_waiting(sequences: list[Sequence]) -> list[Sequence]:
    """The sequences that have not ended meanwhile."""
    return [sequence for sequence in sequences if sequence.phase == "seeking"]
