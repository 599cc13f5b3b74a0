"""Decode-first: requests that this engine took, and whose prompt it has another engine compute while it keeps room.

What is passed on is held by the other engine alone, which hands it over as any prefill engine does; the gateway knows.
Here only a number of blocks and a place among the running sequences stay behind, for a while: a courtesy that is lost
without harm.
"""

from __future__ import annotations

from typing import NamedTuple

from services.scheduler.core.sequence import Sequence
from services.scheduler.core.transfer.store_client import StoreClient
from shared.blocks import blocks_for
from shared.ids import RequestId

KEEP_SECONDS = 10.0
"""For which room is kept. A request that takes longer waits for its turn, as those without room do."""


class _RoomReservation(NamedTuple):
    blocks: int
    until: float


class RemotePrefills:
    """Owns the room that is kept, and the sequences that are to be passed on. One epoch's."""

    def __init__(self, store: StoreClient) -> None:
        self.leaving: list[Sequence] = []
        """To be taken by `EpochState`; only this class writes it."""
        self._store = store
        self._kept: dict[RequestId, _RoomReservation] = {}

    def pays(self, sequence: Sequence, cached: int, *, decodes: bool) -> bool:
        """Whether another engine is to compute the prompt of a sequence whose turn it is, and of which our own memory
        has `cached` blocks. `decodes`: whether sequences decode here, whose steps the prompt would lengthen."""
        transfer = sequence.transfer
        if transfer.prefill_on is None or sequence.stream.opened or not self._store.attached:
            return False
        left = len(sequence.tokens.known) - cached * sequence.tokens.block_size
        return left >= transfer.remote_from and (decodes or bool(self._kept))

    def leave(self, sequence: Sequence, now: float) -> None:
        """Keeps room for the sequence, which the caller has taken out of its queue."""
        self.leaving.append(sequence)
        blocks = blocks_for(sequence.tokens.length, sequence.tokens.block_size) + 1
        self._kept[sequence.generation.request] = _RoomReservation(blocks, now + KEEP_SECONDS)

    def take_leaving(self) -> list[Sequence]:
        """The sequences to be passed on; each is returned once."""
        leaving, self.leaving = self.leaving, []
        return leaving

    def release(self, request: RequestId) -> None:
        """The request has come back and begins, or it will not come back."""
        self._kept.pop(request, None)

    def expire(self, now: float) -> None:
        """Gives up what was kept for too long."""
        for request in [request for request, room in self._kept.items() if now >= room.until]:
            del self._kept[request]

    def room_besides(self, request: RequestId) -> tuple[int, int]:
        """Places among the running sequences, and blocks, that are kept for other requests than this one."""
        if not self._kept:
            return 0, 0
        others = [room.blocks for other, room in self._kept.items() if other != request]
        return len(others), sum(others)
