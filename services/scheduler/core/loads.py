"""What the KV store has of sequences that have come, and what of it is being copied to the device.

A sequence is looked up when it comes, out of the line; its place there is by its arrival anyway. When its turn comes it
gets blocks, is loaded beside the others' steps, and computes only the rest. Whatever fails on the way is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from services.scheduler.core.kv_memory import KvMemory
from services.scheduler.core.limits import Limits
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.store import Arena, Store
from services.scheduler.core.transfers import Place, Transfers
from shared.blocks import BLOCK_SIZE, BlockHash
from shared.ids import LeaseId, SequenceId
from shared.messages.kvstore import Found, KvStoreAnswer
from shared.slots import unpack_generations
from shared.tokens import unpack

MOST_ASKED = 256
"""Questions on their way; beyond it a newcomer is computed."""
MOST_LOOKUPS = 3
"""Times that one sequence is looked up: what was found may be stale when its turn comes."""

Turn = Literal["compute", "look again", "await", "load"]
"""What a sequence that is first in line does now. await: others load the same block already."""


class _Copy(NamedTuple):
    """One found block."""

    hash: BlockHash
    slot: int
    generation: int


@dataclass(slots=True)
class _Lookup:
    """What was found for one sequence, from its block `first` on."""

    lease: LeaseId
    first: int
    times: int
    arena: Arena | None = None
    found: list[_Copy] | None = None
    """None: not answered yet."""
    at: float = 0.0


@dataclass(slots=True)
class _Load:
    """Blocks that are being copied; they are named when all is well, whether the sequence is still there or not."""

    sequence: Sequence | None
    names: list[tuple[BlockHash, int]]
    """Full blocks, and where they will be."""
    tokens: int
    """How many of the sequence's tokens are computed then."""
    drop: bytes
    awaited_by: list[Sequence]


class Loaded(NamedTuple):
    """What became of a load. `sequence` goes on with `tokens` computed (None: it failed); `others` wait again."""

    sequence: Sequence | None
    tokens: int | None
    others: list[Sequence]


class Loads:
    """Owns what was found for whom, and the loads under way."""

    def __init__(self, limits: Limits, store: Store, memory: KvMemory, transfers: Transfers) -> None:
        self._limits = limits
        self._store = store
        self._memory = memory
        self._transfers = transfers
        self._lookups: dict[SequenceId, _Lookup] = {}
        self._asked: dict[LeaseId, Sequence] = {}
        self._loading: dict[LeaseId, _Load] = {}
        self._coming: dict[BlockHash, LeaseId] = {}
        """Full blocks that are being loaded, and by which load."""

    def look_up(self, sequence: Sequence) -> bool:
        """Asks the store, where it may have more than our own memory. The sequence then waits for `answered`."""
        if not self._store.attached or len(self._asked) >= MOST_ASKED:
            return False
        first = len(self._memory.cached_blocks(sequence))
        hashes = _wanted(sequence, first)
        before = self._lookups.get(sequence.id)
        times = 0 if before is None else before.times
        if not hashes or times >= MOST_LOOKUPS:
            return False
        if before is not None:
            self._store.release(before.lease)
        remote = sequence.kv_source is not None and sequence.kv_source != self._store.node
        deadline = self._limits.remote_deadline if remote else self._limits.store_deadline
        lease = self._store.find(hashes, deadline, sequence.kv_source if remote else None)
        self._lookups[sequence.id] = _Lookup(lease, first, times + 1)
        self._asked[lease] = sequence
        return True

    def answered(self, lease: LeaseId, answer: KvStoreAnswer | None, now: float) -> Sequence | None:
        """The sequence that can wait in line now; None where it is not there any more."""
        sequence = self._asked.pop(lease, None)
        lookup = None if sequence is None else self._lookups.get(sequence.id)
        if sequence is None or lookup is None or lookup.lease != lease:
            self._store.release(lease)
            return None
        lookup.arena = self._store.arena(answer) if isinstance(answer, Found) else None
        if isinstance(answer, Found) and lookup.arena is not None and answer.slots:
            lookup.found = _copies(_wanted(sequence, lookup.first), answer)
            lookup.at = now
            self._store.tally.hits += 1
        else:
            self._store.tally.misses += 1
            del self._lookups[sequence.id]
            self._store.release(lease)
        return sequence

    # ---- its turn

    def concerns(self, sequence: Sequence) -> bool:
        """Whether something was found for it."""
        return sequence.id in self._lookups

    def turn(self, sequence: Sequence, cached: int, now: float) -> Turn:
        """What to do with the first in line, of which our own memory has `cached` blocks."""
        lookup = self._lookups.get(sequence.id)
        if lookup is None or lookup.found is None:
            return "compute"
        stale = not self._store.holds(lookup.lease) or now - lookup.at > self._store.fresh_seconds
        if stale or cached < lookup.first:  # of what was before it, our own memory has lost some
            return "look again"
        missing = lookup.found[cached - lookup.first :]
        if not missing:
            return "compute"
        if missing[0].hash in self._coming:
            return "await"
        return "load" if self._transfers.room > 0 else "compute"

    def await_other(self, sequence: Sequence, cached: int) -> None:
        """Until the load under way of the first block that it lacks has ended."""
        lookup = self._lookups[sequence.id]
        assert lookup.found is not None
        self._loading[self._coming[lookup.found[cached - lookup.first].hash]].awaited_by.append(sequence)

    def begin(self, sequence: Sequence, cached: list[int], now: float) -> None:
        """Gives it blocks and has them filled. The caller has looked whether there are enough."""
        lookup = self._lookups.pop(sequence.id)
        assert lookup.found is not None
        assert lookup.arena is not None
        copies = lookup.found[len(cached) - lookup.first :]
        self._memory.adopt(sequence, cached)
        tokens = min((len(cached) + len(copies)) * BLOCK_SIZE, sequence.reusable)
        blocks = self._memory.grow(sequence, tokens)
        places = [Place(block, copy.slot, copy.generation) for block, copy in zip(blocks, copies, strict=True)]
        self._transfers.add("load", lookup.lease, lookup.arena, places, now)
        names = [(copy.hash, block) for block, copy in zip(blocks, copies, strict=True)]
        drop = b""
        if tokens % BLOCK_SIZE:
            drop, _ = names.pop()
        sequence.partial = None
        self._coming.update((hash_, lookup.lease) for hash_, _ in names)
        self._loading[lookup.lease] = _Load(sequence, names, tokens, drop, [])

    def over(self, lease: LeaseId, done: bool) -> Loaded:
        """A load has ended. Called before its transfer gives the blocks back."""
        load = self._loading.pop(lease)
        for hash_, block in load.names:
            del self._coming[hash_]
            if done:
                self._memory.index.add(hash_, block)
        tally = self._store.tally
        if done:
            tally.blocks_loaded += len(load.names) + bool(load.drop)
        else:
            tally.loads_failed += 1
        self._store.release(lease, load.drop)
        others = [sequence for sequence in load.awaited_by if sequence.phase == "seeking"]
        return Loaded(load.sequence, load.tokens if done else None, others)

    # ---- the end

    def forget(self, sequence: Sequence) -> None:
        """It needs nothing from the store any more: it is computed, or has ended."""
        lookup = self._lookups.pop(sequence.id, None)
        if lookup is not None and lookup.found is not None:  # else it is released when the answer comes
            drop = sequence.partial if any(copy.hash == sequence.partial for copy in lookup.found) else None
            self._store.release(lookup.lease, drop or b"")
        sequence.partial = None

    def leave(self, sequence: Sequence) -> None:
        """It ends while it is loaded: the copying goes on for whoever else may want the blocks."""
        for load in self._loading.values():
            if load.sequence is sequence:
                load.sequence = None

    def close(self) -> None:
        """The epoch is over. Whoever still reads for it, reads for nobody."""
        for lease in self.leases:
            self._store.release(lease)

    @property
    def leases(self) -> set[LeaseId]:
        """All that are held, or will be once the question is answered."""
        return {*(lookup.lease for lookup in self._lookups.values()), *self._loading, *self._asked}


def _wanted(sequence: Sequence, first: int) -> list[BlockHash]:
    """From block `first` on: full blocks, then the partial one that was handed over with the sequence."""
    hashes = sequence.hashes[first : sequence.reusable // BLOCK_SIZE]
    if sequence.partial is not None and sequence.reusable % BLOCK_SIZE:
        hashes.append(sequence.partial)
    return hashes


def _copies(hashes: list[BlockHash], found: Found) -> list[_Copy]:
    """Those of `hashes` that were found. Raises ValueError for an answer that does not fit together."""
    slots = unpack(found.slots)
    generations = unpack_generations(found.generations)
    if len(slots) != len(generations):
        raise ValueError(f"{len(slots)} slots have {len(generations)} generations")
    return [_Copy(*each) for each in zip(hashes, slots, generations, strict=False)]
