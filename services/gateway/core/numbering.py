"""Finds out by their numbers which messages of a detokenizer were lost or came twice."""

from __future__ import annotations

from typing import Literal

from shared.ids import DetokenizerId, Incarnation

Order = Literal["next", "stale", "gap"]


class Numbering:
    """Owns the next number expected of each detokenizer's present life."""

    def __init__(self) -> None:
        self._expected: dict[DetokenizerId, tuple[Incarnation, int]] = {}

    def take(self, detokenizer: DetokenizerId, epoch: Incarnation, number: int) -> Order:
        """How `number` follows what came before. The first of a life is taken as it comes: this gateway may be
        the younger of the two, and a delta's position shows what was lost before it."""
        known = self._expected.get(detokenizer)
        if known is not None and known[0] == epoch and number < known[1]:
            return "stale"
        self._expected[detokenizer] = (epoch, number + 1)
        if known is None or known[0] != epoch or number == known[1]:
            return "next"
        return "gap"

    def forget(self, detokenizer: DetokenizerId) -> None:
        self._expected.pop(detokenizer, None)
