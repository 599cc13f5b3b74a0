"""One memory budget over the arenas of all layouts: who gets a slot, who must go for it."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.core.actions import Action, Evicted, GivenBack
from kvstore.core.shelf import Block, Shelf

MAX_EVICTIONS = 256
"""For one question: each may be copied to a tier below while others wait for their answers."""

RETRY_MEMORY = 10.0
"""Seconds after which memory is asked for again that the system did not have."""
AHEAD_BYTES = 128 * 2**20
AHEAD_SHARE = 0.25
"""Free memory that a layout which is being written has at hand, and the largest share of the budget for it: the system
clears pages at a few GB/s, which nobody who asks shall wait for."""


class Room:
    """Owns the shelves, and what memory they may take together."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.limit = budget
        """Less than the budget where the system has not as much."""
        self._retry_at = 0.0
        self.shelves: dict[str, Shelf] = {}
        self.evictions = 0
        """Since the start."""

    @property
    def memory(self) -> int:
        return sum(shelf.memory for shelf in self.shelves.values())

    def refused(self, now: float) -> None:
        """The system has no more memory, whatever the budget says: what is taken already must do for now."""
        self.limit = min(self.limit, self.memory)
        self._retry_at = now + RETRY_MEMORY

    def time_passed(self, now: float) -> None:
        if self.limit < self.budget and now >= self._retry_at:
            self.limit = self.budget

    def take(self, shelf: Shelf, now: float, evictions: int, out: list[Action]) -> tuple[int, bool] | None:
        """A slot of `shelf` and whether it has no memory yet; None where there is no room before this many
        `evictions` since the start. Free slots first, then new memory, then that of other layouts, then eviction."""
        while True:
            if shelf.free:
                return shelf.free.pop(), False
            if shelf.absent and self.memory + shelf.block_bytes <= self.limit:
                return shelf.absent.pop(), True
            if shelf.absent and self._give_back(out):
                continue
            victims = self.shelves.values() if shelf.absent else (shelf,)
            if self.evictions >= evictions or not self._evict(victims, now, out):
                return None

    def prepare(self, shelf: Shelf) -> int | None:
        """A slot whose memory should be taken now, before it is asked for; None where there is enough or no room."""
        at_hand = len(shelf.free) + len(shelf.preparing)
        enough = min(AHEAD_BYTES, AHEAD_SHARE * self.budget) // shelf.block_bytes
        if not shelf.absent or at_hand >= enough or self.memory + shelf.block_bytes > self.limit:
            return None
        slot = shelf.absent.pop()
        shelf.preparing.add(slot)
        return slot

    def prepared(self, shelf: Shelf, slot: int, taken: bool, now: float) -> None:
        """Its memory is there, or not to be had."""
        shelf.preparing.remove(slot)
        (shelf.free if taken else shelf.absent).append(slot)
        if not taken:
            self.refused(now)

    def _give_back(self, out: list[Action]) -> bool:
        """Gives the memory of one free slot of any layout back."""
        for shelf in self.shelves.values():
            if shelf.free:
                slot = shelf.free.pop()
                out.append(GivenBack(shelf.layout, slot, shelf.next_generation(slot)))
                shelf.absent.append(slot)
                return True
        return False

    def _evict(self, victims: Iterable[Shelf], now: float, out: list[Action]) -> bool:
        """Frees the slot of the block that was used least recently on any of these shelves."""
        oldest = [(block.used, shelf, block) for shelf in victims if (block := shelf.oldest()) is not None]
        if not oldest:
            return False
        _, shelf, block = min(oldest, key=lambda entry: entry[0])
        self._remove(shelf, block, now, out)
        return True

    def _remove(self, shelf: Shelf, block: Block, now: float, out: list[Action]) -> None:
        shelf.take_out(block)
        shelf.free.append(block.slot)
        self.evictions += 1
        out.append(Evicted(shelf.layout, block.slot, block.hash, block.tokens, now - block.used_at))
