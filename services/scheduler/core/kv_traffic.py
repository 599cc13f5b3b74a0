"""Blocks between our memory and the KV store: what ranks and store say of them, and whom that concerns."""

from __future__ import annotations

from services.scheduler.core.hand_overs import HandOvers, Settled
from services.scheduler.core.kv_memory import KvMemory
from services.scheduler.core.loads import Loads
from services.scheduler.core.places import Places
from services.scheduler.core.saves import Saves
from services.scheduler.core.transfers import Transfers
from shared.messages.kvstore import Commit, Find, KvStoreAnswer, Reserve
from shared.messages.scheduler import Transferred


class KvTraffic:
    """Owns nothing; one epoch's."""

    def __init__(
        self, memory: KvMemory, transfers: Transfers, loads: Loads, saves: Saves, hand_overs: HandOvers, places: Places
    ) -> None:
        self._memory = memory
        self._transfers = transfers
        self._loads = loads
        self._saves = saves
        self._hand_overs = hand_overs
        self._places = places

    def transferred(self, report: Transferred, now: float) -> None:
        """A rank has copied, or failed to."""
        for kind, lease, done in self._transfers.reported(report, now):
            if kind == "save":
                self._saves.over(lease, done)
                continue
            sequence, tokens, others = self._loads.over(lease, done)
            if sequence is not None:
                self._places.loaded(sequence, tokens)
            for other in others:
                self._places.resume(other)

    def answered(self, question: Find | Reserve | Commit, answer: KvStoreAnswer | None, now: float) -> None:
        """The store has, or (None) has not in time."""
        if isinstance(question, Find):
            sequence = self._loads.answered(question.lease, answer, now)
            if sequence is not None:
                self._places.resume(sequence)
        elif isinstance(question, Reserve):
            self._saves.answered(question.lease, answer, now)
        else:
            self._saves.committed(question.lease, answer)

    def offer(self, now: float, *, idle: bool) -> list[Settled]:
        """What the last plan computes, to the store; answers with those whose blocks it has all, or cannot have."""
        fresh, self._memory.fresh = self._memory.fresh, []
        self._saves.offer(fresh, now)
        self._saves.reserve(now, idle=idle)
        for save in self._saves.take_over():
            self._hand_overs.over(save)
        return self._hand_overs.settled() if self._hand_overs else []
