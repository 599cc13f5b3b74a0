"""Which fault strikes what, in which order, and how far into a round. Pure: the same seed is the same schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import NamedTuple

MAX_DELAY = 0.5
"""Seconds after all streams have begun within which a fault strikes."""


class Case(NamedTuple):
    """A row of the matrix: a kind of fault, and the kind of process or connection that it strikes."""

    fault: str
    target: str

    def __str__(self) -> str:
        return f"{self.fault} {self.target}".rstrip()


class Strike(NamedTuple):
    """One round: a fault under load."""

    number: int
    """From 0."""
    case: Case
    delay: float
    """Seconds from the moment when every client has an open stream to the fault."""
    choice: float
    """In [0, 1): which of several processes of the target is struck."""

    def victim(self, candidates: Sequence[str]) -> str:
        """The one of `candidates` that is struck; they are not empty."""
        return sorted(candidates)[int(self.choice * len(candidates))]


def strikes(cases: Sequence[Case], seed: int) -> Iterator[Strike]:
    """Without an end: every case once, in an order that is drawn anew for each pass, so that each may follow each."""
    random, number = Random(seed), 0
    while cases:
        for case in random.sample(cases, len(cases)):
            yield Strike(number, case, random.uniform(0.0, MAX_DELAY), random.random())
            number += 1


def cases_of(targets: Mapping[str, Sequence[str]]) -> list[Case]:
    """All cases of `targets`: the targets of each fault, by its name."""
    return [Case(fault, target) for fault, found in targets.items() for target in found]
