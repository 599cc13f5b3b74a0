"""Slots for the blocks of one fetch from another node, which transports receive into. They copy nothing."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from kvstore.arena.in_flight_block import InFlightBlock
from kvstore.core.store import BlockToWrite
from kvstore.node.node_store import NodeStore, OpenSlot
from kvstore.transfer.interface import BlockName
from shared.blocks import BlockHash

WRITE_SHARE = 0.9
"""Share of a lease during which its slot is written to. What is late all the same meets a slot that rests (ADR 5)."""


class IncomingSlots:
    """Owns the slots that were reserved and have no block yet; gives them up at the end. A `BlockDestination`."""

    def __init__(self, store: NodeStore, layout: str) -> None:
        self._store = store
        self._layout = layout
        self._open: dict[BlockHash, tuple[OpenSlot, memoryview]] = {}
        self.seconds = store.core.leases.seconds * WRITE_SHARE

    def __enter__(self) -> IncomingSlots:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Gives up what did not come. Nothing may write to the slots any more."""
        while self._open:
            opened, _ = self._open.popitem()[1]
            self._store.give_up_slot(opened.key)

    def reserve(self, blocks: Sequence[BlockName]) -> Sequence[memoryview | None]:
        """Memory for each of the blocks; see `BlockDestination.reserve`."""
        memory: list[memoryview | None] = []
        for block in blocks:
            if self._store.is_known(self._layout, block.hash):
                memory.append(None)
                continue
            view = self._opened(block)
            if view is None:
                break
            memory.append(view)
        return memory

    def _opened(self, block: BlockName) -> memoryview | None:
        arena = self._store.arena_of(self._layout)
        opened = self._store.open_slot(self._layout, BlockToWrite(*block))
        if opened is None or arena is None:
            return None
        view = arena.payload(opened.slot)
        self._open[block.hash] = opened, view
        return view

    def land(self, block: InFlightBlock) -> bool:
        """Commits a checked block that lies in memory from here, or copies it to a slot; see `NodeStore.land`."""
        reserved = self._open.get(block.hash)
        if reserved is None or reserved[1] is not block.payload:
            return self._store.land(self._layout, block)
        opened, _ = self._open.pop(block.hash)
        arena = self._store.arena_of(self._layout)
        assert arena is not None  # no layout goes while a slot of it is reserved
        if self._store.has_lease(opened.key):
            arena.write_checksums(opened.slot, block.checksums)
        return self._store.commit_slot(opened.key)
