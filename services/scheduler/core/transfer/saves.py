"""Saving computed blocks to the KV store: offered, reserved, copied, committed. Bounded; what exceeds the bounds is not
saved.

A block that waits to be copied needs no reference: the prefix index knows where its contents are, and if they are gone
the block is not saved. Only a partial block, which the index does not know, is given by its number.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from services.scheduler.core.memory import BlockAllocator, NamedBlock
from services.scheduler.core.transfer.block_transfers import BlockCopy, BlockTransfers
from services.scheduler.core.transfer.store_client import StoreArena, StoreClient
from shared.blocks import BlockHash
from shared.ids import LeaseId
from shared.messages.kvstore import NO_SLOT, CommitReply, KvStoreReply, ReserveReply
from shared.packing import unpack, unpack_generations
from shared.reliability.transitions import extend_history

MAX_BLOCKS = 512
"""Most blocks of all layers on their way to the store; also at most a quarter of KV memory, since a block cannot be
reused while it is copied. This and the numbers below count blocks of tokens: where layers have tables of their own,
each has as many records as there are tables; and this and the next one allow for a checkpoint of states behind each."""
MAX_OFFERED = 1024
"""Most blocks that wait to be reserved; further computed blocks are not saved."""
MAX_TOGETHER = 128
"""Most records of a hand-over in one request: the store evicts no more than twice as many for it."""
MAX_RESERVATIONS = 8
"""Most requests for slots that await a reply."""
MIN_BATCH = 64
"""Blocks that are worth a request of their own. Fewer wait for more, but only for a moment."""
MAX_GATHER_SECONDS = 0.25
"""Seconds for which blocks of decoding sequences are gathered into one request, which costs six messages: few streams
fill few blocks. What is handed over, preempted or left by an idle engine waits for no others."""
PROMPT_GATHER_SECONDS = 0.05
"""The same, where blocks of prompts are among them: other requests may begin as these do."""
MAX_BLOCKS_BESIDE_DECODES = 32
"""Most blocks that one plan saves while sequences decode, because copying takes memory bandwidth from them."""

SaveState = Literal["reserving", "ready", "copying", "committing", "over"]

NEXT_SAVE_STATES: dict[SaveState, frozenset[SaveState]] = {
    "reserving": frozenset({"ready", "over"}),
    "ready": frozenset({"copying", "committing", "over"}),
    "copying": frozenset({"committing", "over"}),
    "committing": frozenset({"over"}),
    "over": frozenset(),
}
"""The states that may follow each state of a save.

reserving: slots are requested from the store. ready: slots are reserved, and some of them are in no plan yet. copying:
all are in plans, and not every rank has copied them. committing: the store was requested to commit them. over: the
lease has ended, because the store has replied, nothing was copied, or something failed.
"""


class _ReservedBlock(NamedTuple):
    hash: BlockHash
    slot: int
    generation: int


@dataclass(slots=True)
class _Save:
    """The blocks that are saved under one lease."""

    lease: LeaseId
    hashes: list[BlockHash]
    partial: dict[BlockHash, int] = field(default_factory=dict)
    """The number of a partial block; none for full blocks, which the prefix index finds."""
    state: SaveState = "reserving"
    history: list[SaveState] = field(default_factory=lambda: ["reserving"])
    arena: StoreArena | None = None
    reserved: deque[_ReservedBlock] = field(default_factory=deque)
    """Blocks with a slot that are not copied yet."""
    reserved_at: float = 0.0
    copied: int = 0
    copying: int = 0
    """Number of its transfers in flight."""
    failed: bool = False
    missing: list[BlockHash] = field(default_factory=list)
    """Blocks that were not there any more when they were to be copied."""
    wanted: bool = True

    def move(self, state: SaveState) -> None:
        """Enters `state`. Raises IllegalTransition."""
        self.history = extend_history(NEXT_SAVE_STATES, self.history, state, f"save {self.lease}")
        self.state = state


class SaveOutcome(NamedTuple):
    """The end of a save: all blocks of the lease but those `missing` are in the store or, if not `good`, any may not
    be."""

    lease: LeaseId
    good: bool
    missing: tuple[BlockHash, ...]


class Saves:
    """Owns the blocks on their way to the store."""

    def __init__(self, store: StoreClient, memory: BlockAllocator, transfers: BlockTransfers) -> None:
        self.ready: deque[_Save] = deque()
        """Saves with blocks to copy in the next plan; only this class writes it."""
        self._store = store
        self._memory = memory
        self._transfers = transfers
        self._tables, self._records = memory.tables, memory.records
        self._max_blocks = max(1, min(MAX_BLOCKS * self._records, memory.pool.total // 4))
        self._offered: dict[BlockHash, bytes] = {}
        """The hash of each offered block and its parent's hash."""
        self._due = 0.0
        """When they are reserved, however few there are."""
        self._saves: dict[LeaseId, _Save] = {}
        self._reserving = 0
        self._under_way: dict[BlockHash, LeaseId] = {}
        self._blocks = 0
        self._outcomes: list[SaveOutcome] = []

    @property
    def possible(self) -> bool:
        """Whether the store accepts requests at present."""
        return self._store.attached

    @property
    def busy(self) -> bool:
        """Whether anything that was offered is not saved yet."""
        return bool(self._offered or self._saves)

    @property
    def leases(self) -> set[LeaseId]:
        """All leases that are held, or will be once the store has replied."""
        return set(self._saves)

    @property
    def copying(self) -> int:
        """Number of transfers in flight."""
        return sum(save.copying for save in self._saves.values())

    # ---- reserving

    def offer(self, blocks: list[NamedBlock], now: float, *, prompts: bool) -> None:
        """Offers the blocks that the plan just made computes; `prompts`: of prompts, too. Those beyond MAX_OFFERED are
        counted as unsaved."""
        if not self._store.attached:
            return
        due = now + (PROMPT_GATHER_SECONDS if prompts else MAX_GATHER_SECONDS)
        self._due = min(self._due, due) if self._offered else due
        room = max(0, MAX_OFFERED * self._records - len(self._offered))
        for block in blocks[:room]:
            if block.hash not in self._under_way:
                self._offered[block.hash] = block.parent
        self._store.counters.blocks_unsaved += len(blocks[room:])

    def reserve(self, now: float, *, idle: bool) -> None:
        """Requests slots if enough blocks are gathered, or have waited long enough, or the engine is idle."""
        most = MIN_BATCH * self._tables
        while self._offered and self._reserving < MAX_RESERVATIONS:
            count = min(len(self._offered), most, self._max_blocks - self._blocks)
            due = len(self._offered) >= most or idle or now >= self._due
            if count <= 0 or not due:
                return
            batch = {hash_: self._offered.pop(hash_) for hash_ in list(self._offered)[:count]}
            self._due = now + PROMPT_GATHER_SECONDS  # of the rest, where that was not all
            if self._store.attached:
                self._reserve(batch)

    def save_now(self, blocks: list[NamedBlock]) -> set[LeaseId]:
        """Saves full blocks of a sequence that is to be handed over, ahead of others. Returns the leases to wait
        for."""
        leases = {self._under_way[block.hash] for block in blocks if block.hash in self._under_way}
        rest = {block.hash: block.parent for block in blocks if block.hash not in self._under_way}
        for hash_ in rest:
            self._offered.pop(hash_, None)
        return leases.union(map(self._reserve, _parts(rest)))

    def hurry(self, hashes: list[BlockHash]) -> set[BlockHash]:
        """Requests slots for those of the blocks that still wait for others to be saved with, as they lose their memory
        soon. Returns those that are not in the store yet."""
        if not self._store.attached:
            return set()
        count = max(0, self._max_blocks - self._blocks)
        waiting = [hash_ for hash_ in hashes if hash_ in self._offered][:count]
        if waiting and self._reserving < MAX_RESERVATIONS:
            self._reserve({hash_: self._offered.pop(hash_) for hash_ in waiting})
        return {hash_ for hash_ in hashes if hash_ in self._under_way}

    def save_partial(self, named: list[NamedBlock], tokens: int, blocks: list[int]) -> set[LeaseId]:
        """Saves the block of `tokens`, not full, of every table, and what belongs to it. The caller must keep `blocks`
        until the leases are over, or call them off."""
        numbers = {each.hash: block for each, block in zip(named, blocks, strict=True)}
        parts = _parts({each.hash: each.parent for each in named})
        return {self._reserve(part, tokens, {hash_: numbers[hash_] for hash_ in part}) for part in parts}

    def _reserve(
        self, batch: dict[BlockHash, bytes], tokens: int | None = None, partial: dict[BlockHash, int] | None = None
    ) -> LeaseId:
        """`batch`: hashes, each with its parent's; `tokens`: of each block; None: full ones."""
        hashes = list(batch)
        counts = bytes([tokens or self._memory.block_size]) * len(hashes)
        lease = self._store.reserve(hashes, list(batch.values()), counts)
        self._saves[lease] = _Save(lease, hashes, partial or {})
        self._under_way.update((hash_, lease) for hash_ in hashes)
        self._blocks += len(hashes)
        self._reserving += 1
        return lease

    def record_reservation(self, lease: LeaseId, reply: KvStoreReply | None, now: float) -> None:
        """Records the store's reply to a reservation; None: it did not reply in time."""
        save = self._saves.get(lease)
        if save is None:  # of an epoch that is over
            self._store.release(lease)
            return
        self._reserving -= 1
        if isinstance(reply, ReserveReply) and save.wanted and self._store.holds(lease):
            save.arena, save.reserved_at = self._store.arena(reply), now
            save.reserved.extend(_reserved_blocks(save.hashes, reply))
        if save.arena is not None and save.reserved and len(save.reserved) >= len(save.partial):
            save.move("ready")
            self.ready.append(save)
        else:  # all of it is there already or being written, or there is no room: the latter, for a partial block
            self._finish(save, good=save.arena is not None and not save.partial)

    # ---- copying

    def plan(self, max_blocks: int, now: float) -> None:
        """Adds transfers to the plan that is being made, at most `max_blocks` blocks of tokens together."""
        max_blocks *= self._tables
        while self.ready and max_blocks > 0 and self._transfers.room > 0:
            save = self.ready[0]
            if not self._store.holds(save.lease) or now - save.reserved_at > self._store.usable_seconds:
                save.reserved.clear()
                save.failed = True
            max_blocks -= self._copy(save, max_blocks, now)
            if not save.reserved:
                self.ready.popleft()
                self._advance(save)

    def _copy(self, save: _Save, max_blocks: int, now: float) -> int:
        """Adds some of its blocks to the plan; returns how many."""
        assert save.arena is not None
        copies: list[BlockCopy] = []
        while save.reserved and len(copies) < max_blocks:
            each = save.reserved.popleft()
            block = save.partial[each.hash] if save.partial else self._memory.index.find(each.hash)
            if block is None:
                save.missing.append(each.hash)
            else:
                copies.append(BlockCopy(block, each.slot, each.generation))
        if copies:
            self._transfers.add("save", save.lease, save.arena, copies, now)
            save.copying += 1
            save.copied += len(copies)
        return len(copies)

    def finish_transfer(self, lease: LeaseId, done: bool) -> None:
        """Records the end of one of the lease's transfers; `done`: every rank has copied all of it."""
        save = self._saves[lease]
        save.copying -= 1
        save.failed = save.failed or not done
        if save.state == "copying":
            self._advance(save)

    def _advance(self, save: _Save) -> None:
        """Nothing of it is left to plan: commits what has been copied, where all has; gives the rest back."""
        if save.copying:
            if save.state != "copying":
                save.move("copying")
        elif not save.wanted or save.failed or not self._store.holds(save.lease):
            self._finish(save, good=False)
        elif save.copied:
            save.move("committing")
            self._store.commit(save.lease)
        else:  # every one of them is missing
            self._finish(save, good=True)

    def record_commit(self, lease: LeaseId, reply: KvStoreReply | None) -> None:
        """The store shows the lease's blocks to others now; None: it has not replied in time."""
        save = self._saves.get(lease)
        if save is not None:
            shown = reply.blocks if isinstance(reply, CommitReply) else 0
            self._store.counters.blocks_saved += shown
            self._finish(save, good=shown >= save.copied)

    def _finish(self, save: _Save, *, good: bool) -> None:
        save.move("over")
        self._store.release(save.lease)
        del self._saves[save.lease]
        for hash_ in save.hashes:
            del self._under_way[hash_]
        self._blocks -= len(save.hashes)
        self._store.counters.blocks_unsaved += len(save.missing)
        self._outcomes.append(SaveOutcome(save.lease, good, tuple(save.missing)))

    # ---- the end

    def call_off(self, lease: LeaseId) -> None:
        """No sequence waits for this partial block any more. Before it is copied it need not be; no other sees it."""
        save = self._saves.get(lease)
        if save is None:
            return
        save.wanted = False
        if save.state == "ready":
            self.ready.remove(save)
            save.reserved.clear()
            self._advance(save)

    def forget_reservations(self) -> None:
        """The store is another one, or gone: what was reserved there is void. What is being copied ends by itself."""
        self._offered.clear()
        for save in list(self.ready):
            self.ready.remove(save)
            save.reserved.clear()
            self._advance(save)

    def take_outcomes(self) -> list[SaveOutcome]:
        """Leases that are over since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def close(self) -> None:
        """The epoch is over. Slots that a rank may still be writing to are left to run out."""
        for save in self._saves.values():
            if save.copying:
                self._store.forget(save.lease)
            else:
                self._store.release(save.lease)


def _parts(batch: dict[BlockHash, bytes]) -> list[dict[BlockHash, bytes]]:
    """In the same order, none with more than MAX_TOGETHER."""
    hashes = list(batch)
    firsts = range(0, len(hashes), MAX_TOGETHER)
    return [{hash_: batch[hash_] for hash_ in hashes[first : first + MAX_TOGETHER]} for first in firsts]


def _reserved_blocks(hashes: list[BlockHash], reserved: ReserveReply) -> list[_ReservedBlock]:
    """Raises ValueError for a reply that does not fit the request."""
    slots, generations = unpack(reserved.slots), unpack_generations(reserved.generations)
    blocks = (_ReservedBlock(*each) for each in zip(hashes, slots, generations, strict=True))
    return [block for block in blocks if block.slot != NO_SLOT]
