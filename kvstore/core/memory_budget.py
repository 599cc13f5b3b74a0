"""One memory budget over the arenas of all layouts: which layout gets a slot, and which block is evicted for it."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator

from kvstore.core.actions import Action, EvictBlock, GiveMemoryBack
from kvstore.core.slot_table import SlotTable, StoredBlock
from shared.blocks import BlockHash

MAX_EVICTIONS = 256
"""The most evictions for one request: each may be copied to a lower tier while others wait for their replies."""

MEMORY_RETRY_SECONDS = 10.0
"""Seconds until the system is asked for memory again after a failed attempt."""
PREPARED_BYTES = 128 * 2**20
PREPARED_SHARE = 0.25
"""Free memory that is kept ready for a layout that is being written, and the largest share of the budget that this may
take. The system clears pages at a few GB/s, and no request shall wait for that."""


class MemoryBudget:
    """Owns the slot tables of all layouts and the memory that they may take together."""

    def __init__(self, total: int) -> None:
        """`total` is the budget in bytes."""
        self.total = total
        self.limit = total
        """Bytes that may be in use at present; less than `total` while the system itself is short of memory."""
        self._retry_at = 0.0
        self.tables: dict[str, SlotTable] = {}
        """Slot tables by the fingerprint of their layout."""
        self.evictions = 0
        """Number of evicted blocks since the start."""

    @property
    def memory(self) -> int:
        """Bytes that all tables have in use."""
        return sum(table.memory for table in self.tables.values())

    def record_shortage(self, now: float) -> None:
        """Records that the system has no more memory: for a while the limit is what is already in use."""
        self.limit = min(self.limit, self.memory)
        self._retry_at = now + MEMORY_RETRY_SECONDS

    def update(self, now: float) -> None:
        """Lifts the limit of a shortage that is MEMORY_RETRY_SECONDS old."""
        if self.limit < self.total and now >= self._retry_at:
            self.limit = self.total

    def reserve(self, table: SlotTable, now: float, evictions: int, out: list[Action]) -> tuple[int, bool] | None:
        """Reserves a slot of `table` and returns it with whether it still lacks memory. Returns None if there is no
        room without exceeding `evictions` (counted since the start). It prefers a free slot, then new memory, then
        memory of other layouts, then eviction. The actions that this takes are appended to `out`."""
        while True:
            if table.free:
                return table.reserve_free(), False
            if table.absent and self.memory + table.block_bytes <= self.limit:
                return table.reserve_absent(), True
            if table.absent and self._give_back(out):
                continue
            victims = self.tables.values() if table.absent else (table,)
            if self.evictions >= evictions or not self._evict(victims, now, out):
                return None

    def prepare(self, table: SlotTable) -> int | None:
        """A slot whose memory should be allocated now, ahead of use; None if there is enough of it or no room."""
        at_hand = len(table.free) + len(table.preparing)
        enough = min(PREPARED_BYTES, PREPARED_SHARE * self.total) // table.block_bytes
        if not table.absent or at_hand >= enough or self.memory + table.block_bytes > self.limit:
            return None
        return table.start_preparing()

    def finish_preparing(self, table: SlotTable, slot: int, taken: bool, now: float) -> None:
        """The memory of a slot from `prepare` is there, or not to be had."""
        table.finish_preparing(slot, taken=taken)
        if not taken:
            self.record_shortage(now)

    def _give_back(self, out: list[Action]) -> bool:
        """Gives the memory of one free slot of any layout back."""
        for table in self.tables.values():
            if table.free:
                slot = table.give_back()
                out.append(GiveMemoryBack(table.layout, slot, table.next_generation(slot)))
                return True
        return False

    def _evict(self, victims: Iterable[SlotTable], now: float, out: list[Action]) -> bool:
        """Frees the slot of the block that was used least recently in any of these tables; False where none may go."""
        oldest = [(block.used, table, block) for table in victims if (block := table.oldest()) is not None]
        if not oldest:
            return False
        _, table, block = min(oldest, key=lambda entry: entry[0])
        table.free_block(block)
        self.evictions += 1
        out.append(EvictBlock(table.layout, block.slot, block.hash, block.tokens, now - block.used_at))
        return True


def next_victims(tables: Iterable[SlotTable]) -> Iterator[tuple[SlotTable, StoredBlock]]:
    """The blocks that would be evicted next, in that order, were none of them used meanwhile. Changes nothing. Lazy:
    costs O(log n) for each block that is taken from it."""

    def of(table: SlotTable) -> Iterator[tuple[SlotTable, StoredBlock]]:
        return ((table, block) for block in _victims(table))

    return heapq.merge(*map(of, tables), key=lambda entry: entry[1].used)


def _victims(table: SlotTable) -> Iterator[StoredBlock]:
    """Walks the heap of leaves from its top without taking it apart; a parent follows the last of its children."""
    leaves = table.leaves
    gone: set[BlockHash] = set()
    children_gone: Counter[BlockHash] = Counter()
    # Entries of the heap with their places; whatever lies beyond its end has no entries below it.
    ahead = [(entry, 0) for entry in leaves[:1]]
    while ahead:
        (used, name), place = heapq.heappop(ahead)
        for below in (2 * place + 1, 2 * place + 2):
            if below < len(leaves):
                heapq.heappush(ahead, (leaves[below], below))
        block = table.blocks.get(name)
        if block is None or block.used != used or name in gone or not _is_next(table, block, children_gone):
            continue
        gone.add(name)
        yield block
        children_gone[block.parent] += 1
        parent = table.blocks.get(block.parent)
        if parent is not None and _is_next(table, parent, children_gone):
            heapq.heappush(ahead, ((parent.used, parent.hash), len(leaves)))


def _is_next(table: SlotTable, block: StoredBlock, children_gone: Counter[BlockHash]) -> bool:
    childless = table.children.get(block.hash, 0) == children_gone[block.hash]
    return block.committed and not block.pins and childless
