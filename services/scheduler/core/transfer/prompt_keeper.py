"""Prompts that are kept in the node's KV store for a later request: what a client conducts that hands over by itself.

A kept prompt is a lease on its blocks and no more: whoever has the same tokens, salt and adapter finds them, and what
is gone is computed. So no client can read with it what is not its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from services.scheduler.core.events import SendToGateway, WorkersReady
from services.scheduler.core.memory import BlockAllocator
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.transfer.saves import SaveOutcome, Saves
from services.scheduler.core.transfer.store_client import StoreClient
from shared.blocks import BlockHash
from shared.ids import EngineId, LeaseId, RequestId
from shared.messages.gateway import PromptKept
from shared.messages.generation import Generation
from shared.messages.kvstore import KEEP_SECONDS, FindReply, KvStoreReply
from shared.packing import unpack

MAX_KEPT = 1024
"""Most prompts that are kept, or about to be; for further ones gateways are told that nothing is. How many blocks,
the store bounds."""
FIND_SECONDS = 0.1
"""For which the store may look for what was just saved there."""


@dataclass(slots=True)
class _PromptSave:
    generation: Generation
    names: list[BlockHash]
    blocks: int
    leases: set[LeaseId]
    """Of saves that are not over yet."""
    good: bool = True


@dataclass(slots=True)
class _LeaseRequest:
    generation: Generation
    names: int
    blocks: int


@dataclass(slots=True)
class _PromptLease:
    lease: LeaseId
    until: float


class PromptKeeper:
    """Owns the prompts of one epoch that are being saved to be kept, and the leases of those that are."""

    def __init__(
        self, engine: EngineId, saves: Saves, memory: BlockAllocator, store: StoreClient, workers: WorkersReady
    ) -> None:
        self._engine, self._saves, self._memory, self._store, self._workers = engine, saves, memory, store, workers
        self._reports: list[SendToGateway] = []
        self._saving: dict[RequestId, _PromptSave] = {}
        self._asked: dict[LeaseId, _LeaseRequest] = {}
        self._kept: dict[RequestId, _PromptLease] = {}
        """In the order in which they run out."""

    @property
    def leases(self) -> set[LeaseId]:
        """All leases that are held, or will be once the store has replied."""
        return {*self._asked, *(kept.lease for kept in self._kept.values())}

    def start(self, sequence: Sequence) -> None:
        """Saves the full blocks of the prompt of a sequence that ends, to keep them. Its gateway is told what came of
        it."""
        generation, size = sequence.generation, self._memory.block_size
        blocks = generation.prompt_length // size
        together = len(self._saving) + len(self._asked) + len(self._kept)
        if not (blocks and generation.prefix_caching and self._saves.possible and together < MAX_KEPT):
            self._report(generation, 0)
            return
        needed = self._memory.needed(sequence, 0, blocks * size, None)
        names = [each.hash for each in needed]
        self._saving[generation.request] = _PromptSave(generation, names, blocks, self._saves.save_now(needed))

    def record_save(self, save: SaveOutcome) -> None:
        """Records the end of a save for all prompts that wait for it."""
        for saving in self._saving.values():
            if save.lease in saving.leases:
                saving.leases.remove(save.lease)
                saving.good = saving.good and save.good and set(saving.names).isdisjoint(save.missing)

    def settle(self) -> None:
        """Has the store keep what is saved by now."""
        for request in [r for r, saving in self._saving.items() if not (saving.leases and saving.good)]:
            saving = self._saving.pop(request)
            if not (saving.good and self._store.attached):
                self._report(saving.generation, 0)
                continue
            lease = self._store.find(saving.names, FIND_SECONDS, None, keep=True)
            self._asked[lease] = _LeaseRequest(saving.generation, len(saving.names), saving.blocks)

    def record_reply(self, lease: LeaseId, reply: KvStoreReply | None, now: float) -> bool:
        """The store has replied, or (None) has not in time; False where the lease is not of a kept prompt."""
        asked = self._asked.pop(lease, None)
        if asked is None:
            return False
        found = len(unpack(reply.slots)) if isinstance(reply, FindReply) else 0
        if found < asked.names or not self._store.holds(lease):
            self._store.release(lease)
            self._report(asked.generation, 0)
            return True
        self._kept[asked.generation.request] = _PromptLease(lease, now + KEEP_SECONDS)
        self._report(asked.generation, asked.blocks)
        return True

    def release(self, request: RequestId) -> None:
        """The blocks were used, or are not wanted; an unknown request is no error."""
        if (kept := self._kept.pop(request, None)) is not None:
            self._store.release(kept.lease)

    def expire(self, now: float) -> None:
        """Gives up what nobody has used in time."""
        while self._kept:
            request, kept = next(islice(self._kept.items(), 1))
            if now < kept.until:
                return
            self.release(request)

    def close(self) -> None:
        """The epoch is over. Gateways that still wait are told that nothing is kept."""
        waiting = [saving.generation for saving in self._saving.values()]
        for generation in (*waiting, *(asked.generation for asked in self._asked.values())):
            self._report(generation, 0)
        for lease in self.leases:
            self._store.release(lease)

    def take_reports(self) -> list[SendToGateway]:
        """What gateways are to be told since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def _report(self, generation: Generation, blocks: int) -> None:
        outcome = PromptKept(
            request=generation.request,
            attempt=generation.attempt,
            blocks=blocks,
            engine=self._engine,
            node=self._store.node if blocks else None,
            tokens=blocks * self._memory.block_size,
            ranks=self._workers.world_size // self._workers.stages,
            stages=self._workers.stages,
        )
        self._reports.append(SendToGateway(generation.gateway, outcome))
