"""Whether anything that an engine sent has been missed: its batches are numbered from 0 in each of its epochs."""

from __future__ import annotations

from typing import Literal

from shared.ids import EngineId, Incarnation
from shared.messages.detokenizer import TokenBatch

Arrival = Literal["next", "gap", "new epoch", "stale"]
"""`next`: also the first batch of an engine not heard of before, to which streams may have moved already. `new epoch`:
the engine started anew, with its first batch. `gap`: something is missing, of this epoch or of one not heard of before.
`stale`: of an epoch that is over."""


class Sources:
    """Owns, for each engine, its epoch, the one before, and the number that its next batch has."""

    def __init__(self) -> None:
        self._expected: dict[EngineId, tuple[Incarnation, int]] = {}
        self._former: dict[EngineId, Incarnation] = {}

    def arrived(self, batch: TokenBatch) -> Arrival:
        known = self._expected.get(batch.engine)
        if known is None or known[0] != batch.epoch:
            if self._former.get(batch.engine) == batch.epoch:
                return "stale"
            if known is not None:
                self._former[batch.engine] = known[0]
            self._expected[batch.engine] = (batch.epoch, batch.number + 1)
            if batch.number:
                return "gap"
            return "next" if known is None else "new epoch"
        self._expected[batch.engine] = (batch.epoch, batch.number + 1)
        return "next" if batch.number == known[1] else "gap"

    def forget(self, engine: EngineId) -> None:
        """The engine is gone. Should it live after all, its next batch shows as a gap, and it learns of it."""
        self._expected.pop(engine, None)
        self._former.pop(engine, None)
