"""Which computed blocks go to the KV store: offered, reserved, copied, committed. Bounded, and dropped beyond it.

A block on its way needs no reference before it is copied: the prefix index says where its contents are, and where they
are gone it is not saved. Only a partial block, which has no name there, is given by its number.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from services.scheduler.core.kv_memory import Fresh, KvMemory
from services.scheduler.core.store import Arena, Store
from services.scheduler.core.transfers import Place, Transfers
from shared.blocks import BLOCK_SIZE, BlockHash
from shared.ids import LeaseId
from shared.messages.kvstore import NO_SLOT, Committed, KvStoreAnswer, Reserved
from shared.slots import unpack_generations
from shared.tokens import unpack

MOST_BLOCKS = 512
"""Blocks on their way to the store; at most a quarter of KV memory, since each is kept from other use for a moment."""
MOST_OFFERED = 1024
"""Blocks that wait to be reserved; what is computed beyond is not saved."""
MOST_RESERVING = 8
"""Questions on their way."""
BATCH = 64
"""Blocks that are worth a question of their own. Fewer wait for more, a moment only."""
GATHER = 0.05
"""Seconds for which the blocks of decoding sequences are gathered."""
BESIDE_DECODES = 32
"""Blocks that one plan saves while others decode: copying takes memory bandwidth from them."""


class _Granted(NamedTuple):
    hash: BlockHash
    slot: int
    generation: int


@dataclass(slots=True)
class _Save:
    """What goes to the store under one lease."""

    lease: LeaseId
    hashes: list[BlockHash]
    block: int | None = None
    """Of a partial block: where it is."""
    arena: Arena | None = None
    granted: deque[_Granted] = field(default_factory=deque)
    """Reserved, and not copied yet."""
    at: float = 0.0
    copied: int = 0
    copying: int = 0
    """Transfers under way."""
    failed: bool = False
    complete: bool = True
    """Whether nothing was left out."""
    wanted: bool = True


class SaveOver(NamedTuple):
    """All of a lease's blocks are in the store, or (not `good`) some may be missing."""

    lease: LeaseId
    good: bool


class Saves:
    """Owns what is on its way to the store."""

    def __init__(self, store: Store, memory: KvMemory, transfers: Transfers) -> None:
        self._store = store
        self._memory = memory
        self._transfers = transfers
        self._most = max(1, min(MOST_BLOCKS, memory.pool.total // 4))
        self._offered: dict[BlockHash, bytes] = {}
        self._offered_since = 0.0
        self._saves: dict[LeaseId, _Save] = {}
        self._reserving = 0
        self._ready: deque[_Save] = deque()
        self._under_way: dict[BlockHash, LeaseId] = {}
        self._blocks = 0
        self._over: list[SaveOver] = []

    @property
    def possible(self) -> bool:
        return self._store.attached

    @property
    def busy(self) -> bool:
        """Whether anything is still to be done before all that was offered is saved."""
        return bool(self._offered or self._saves)

    @property
    def pending(self) -> bool:
        """Whether a plan is wanted, if only to copy."""
        return bool(self._ready)

    @property
    def leases(self) -> set[LeaseId]:
        return set(self._saves)

    @property
    def copying(self) -> int:
        """Transfers under way."""
        return sum(save.copying for save in self._saves.values())

    # ---- reserving

    def offer(self, fresh: list[Fresh], now: float) -> None:
        """Blocks that the plan which was just made computes."""
        if not self._store.attached:
            return
        if not self._offered:
            self._offered_since = now
        room = max(0, MOST_OFFERED - len(self._offered))
        for block in fresh[:room]:
            if block.hash not in self._under_way:
                self._offered[block.hash] = block.parent
        self._store.tally.blocks_unsaved += len(fresh[room:])

    def reserve(self, now: float, *, idle: bool) -> None:
        """Asks for slots, where enough blocks are gathered, or have been for long enough, or nothing else happens."""
        while self._offered and self._reserving < MOST_RESERVING:
            count = min(len(self._offered), BATCH, self._most - self._blocks)
            due = len(self._offered) >= BATCH or idle or now - self._offered_since >= GATHER
            if count <= 0 or not due:
                return
            batch = [Fresh(hash_, self._offered.pop(hash_)) for hash_ in list(self._offered)[:count]]
            self._offered_since = now
            if self._store.attached:
                self._ask(batch, bytes([BLOCK_SIZE]) * len(batch), None)

    def save_now(self, blocks: list[Fresh]) -> set[LeaseId]:
        """Everything of a sequence that is to be handed over, whatever else is on its way. The leases to wait for."""
        leases = {self._under_way[block.hash] for block in blocks if block.hash in self._under_way}
        rest = [block for block in blocks if block.hash not in self._under_way]
        for block in rest:
            self._offered.pop(block.hash, None)
        if rest:
            leases.add(self._ask(rest, bytes([BLOCK_SIZE]) * len(rest), None))
        return leases

    def save_partial(self, offered: Fresh, tokens: int, block: int) -> LeaseId:
        """A block that is not full. Whoever asks keeps hold of `block` until it is over, or calls it off."""
        return self._ask([offered], bytes([tokens]), block)

    def _ask(self, batch: list[Fresh], tokens: bytes, block: int | None) -> LeaseId:
        hashes = [offered.hash for offered in batch]
        lease = self._store.reserve(hashes, [offered.parent for offered in batch], tokens)
        self._saves[lease] = _Save(lease, hashes, block)
        self._under_way.update((hash_, lease) for hash_ in hashes)
        self._blocks += len(hashes)
        self._reserving += 1
        return lease

    def answered(self, lease: LeaseId, answer: KvStoreAnswer | None, now: float) -> None:
        save = self._saves.get(lease)
        if save is None:  # of an epoch that is over
            self._store.release(lease)
            return
        self._reserving -= 1
        if isinstance(answer, Reserved) and save.wanted and self._store.holds(lease):
            save.arena, save.at = self._store.arena(answer), now
            save.granted.extend(_granted(save.hashes, answer))
        if save.arena is not None and save.granted:
            self._ready.append(save)
        else:  # all of it is there already or being written, or there is no room: the latter, for a partial block
            self._finish(save, good=save.arena is not None and save.block is None)

    # ---- copying

    def plan(self, most: int, now: float) -> None:
        """Adds transfers to the plan that is being made, of `most` blocks together."""
        while self._ready and most > 0 and self._transfers.room > 0:
            save = self._ready[0]
            if not self._store.holds(save.lease) or now - save.at > self._store.fresh_seconds:
                save.granted.clear()
                save.failed = True
            most -= self._copy(save, most, now)
            if not save.granted:
                self._ready.popleft()
                self._look_at(save)

    def _copy(self, save: _Save, most: int, now: float) -> int:
        """Starts copying some of its blocks; how many."""
        assert save.arena is not None
        places: list[Place] = []
        while save.granted and len(places) < most:
            granted = save.granted.popleft()
            block = self._memory.index.find(granted.hash) if save.block is None else save.block
            if block is None:
                save.complete = False
            else:
                places.append(Place(block, granted.slot, granted.generation))
        if places:
            self._transfers.add("save", save.lease, save.arena, places, now)
            save.copying += 1
            save.copied += len(places)
        return len(places)

    def over(self, lease: LeaseId, done: bool) -> None:
        """A transfer has ended."""
        save = self._saves[lease]
        save.copying -= 1
        save.failed = save.failed or not done
        self._look_at(save)

    def _look_at(self, save: _Save) -> None:
        """Commits what has been copied; gives the rest back."""
        if save.granted or save.copying:
            return
        if save.wanted and not save.failed and save.copied and self._store.holds(save.lease):
            self._store.commit(save.lease)
        else:
            self._finish(save, good=False)

    def committed(self, lease: LeaseId, answer: KvStoreAnswer | None) -> None:
        save = self._saves.get(lease)
        if save is not None:
            shown = answer.blocks if isinstance(answer, Committed) else 0
            self._store.tally.blocks_saved += shown
            self._finish(save, good=save.complete and shown >= save.copied)

    def _finish(self, save: _Save, *, good: bool) -> None:
        self._store.release(save.lease)
        del self._saves[save.lease]
        for hash_ in save.hashes:
            del self._under_way[hash_]
        self._blocks -= len(save.hashes)
        self._over.append(SaveOver(save.lease, good))

    # ---- the end

    def call_off(self, lease: LeaseId) -> None:
        """A partial block that nobody waits for any more. Before it is copied it needs not be; nobody will see it."""
        save = self._saves.get(lease)
        if save is None:
            return
        save.wanted = False
        if save in self._ready:
            self._ready.remove(save)
            save.granted.clear()
            self._look_at(save)

    def forget(self) -> None:
        """The store is another one, or gone: what was reserved there is void. What is being copied ends by itself."""
        self._offered.clear()
        for save in list(self._ready):
            self._ready.remove(save)
            save.granted.clear()
            self._look_at(save)

    def take_over(self) -> list[SaveOver]:
        """Leases that are over since this was asked last."""
        over, self._over = self._over, []
        return over

    def close(self) -> None:
        """The epoch is over. Slots that a rank may still be writing to are left to run out."""
        for save in self._saves.values():
            if save.copying:
                self._store.forget(save.lease)
            else:
                self._store.release(save.lease)


def _granted(hashes: list[BlockHash], reserved: Reserved) -> list[_Granted]:
    """Raises ValueError for an answer that does not fit the question."""
    slots, generations = unpack(reserved.slots), unpack_generations(reserved.generations)
    all_ = (_Granted(*each) for each in zip(hashes, slots, generations, strict=True))
    return [granted for granted in all_ if granted.slot != NO_SLOT]
