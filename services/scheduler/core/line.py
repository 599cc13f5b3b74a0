"""Sequences in the order in which they are served."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from services.scheduler.core.sequence import Rank, Sequence


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


class Line:
    """Owns one line: waiting, prefilling or decoding. Ranks are unique, so every place is found by bisection."""

    def __init__(self) -> None:
        self._members: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        insort(self._members, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Raises ValueError for a sequence that is not in the line."""
        place = bisect_left(self._members, sequence.rank, key=_rank)
        if place == len(self._members) or self._members[place] is not sequence:
            raise ValueError(f"{sequence.generation.request} is not in this line")
        del self._members[place]

    @property
    def first(self) -> Sequence | None:
        return self._members[0] if self._members else None

    @property
    def last(self) -> Sequence | None:
        return self._members[-1] if self._members else None

    def members(self) -> list[Sequence]:
        """A copy, first one first: the line may change while it is walked."""
        return self._members.copy()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)
