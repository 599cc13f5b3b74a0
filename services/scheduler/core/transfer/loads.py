"""Looks up new sequences' blocks in the KV store, and copies them to the device.

A sequence is looked up when it arrives, outside the queue; its position there depends on its arrival anyway. When its
turn comes it gets blocks, is loaded beside the others' steps, and computes only the rest. Whatever fails is computed.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from services.scheduler.core.counters import EngineCounters
from services.scheduler.core.limits import EngineLimits
from services.scheduler.core.memory import BlockAllocator, NamedBlock
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.transfer.block_transfers import BlockCopy, BlockTransfers
from services.scheduler.core.transfer.recompute_costs import RecomputeCosts
from services.scheduler.core.transfer.store_client import StoreArena, StoreClient
from shared.blocks import HASH_BYTES, BlockHash, blocks_for
from shared.ids import LeaseId, SequenceId
from shared.messages.kvstore import FindAnyReply, FindReply, KvStoreReply
from shared.packing import unpack, unpack_generations
from shared.reliability.transitions import extend_history

MAX_LOOKUPS_IN_FLIGHT = 256
"""Requests to the store without a reply; beyond it a new sequence is computed."""
MAX_LOOKUPS = 3
"""Times that one sequence is looked up: what was found may be stale when its turn comes."""

LoadDecision = Literal["compute", "look again", "await", "load"]
"""What a sequence that is first in the queue does now. await: others load the same block already."""

LoadState = Literal["requested", "found", "copying", "over"]

NEXT_LOAD_STATES: dict[LoadState, frozenset[LoadState]] = {
    "requested": frozenset({"found", "over"}),
    "found": frozenset({"copying", "over"}),
    "copying": frozenset({"over"}),
    "over": frozenset(),
}
"""The states that may follow each state of a load.

requested: the store has not replied. found: it has blocks, which wait for the sequence's turn. copying: they are being
copied. over: nothing is left to be done, and the lease is released, or will be when the store's late reply comes."""


class FoundBlock(NamedTuple):
    """A block that the source has, and where."""

    hash: BlockHash
    slot: int
    generation: int
    place: int
    """See `NamedBlock`."""


class _LoadedBlock(NamedTuple):
    """A full block that is being copied, and where it will be."""

    place: int
    hash: BlockHash
    block: int


@dataclass(slots=True)
class PendingLoad:
    """One sequence's lookup in the store, from its block `first` on, and its outcome."""

    lease: LeaseId
    sequence: Sequence | None
    """None: the sequence ended during the copy. If the copy succeeds, its blocks still enter the prefix index."""
    first: int
    lookups: int
    state: LoadState = "requested"
    history: list[LoadState] = field(default_factory=lambda: ["requested"])
    arena: StoreArena | None = None
    wanted: list[NamedBlock] = field(default_factory=list)
    """What the source was asked for, in this order."""
    found: list[FoundBlock] = field(default_factory=list)
    """All that the first `tokens` need from its block `first` on."""
    found_at: float = 0.0
    names: list[_LoadedBlock] = field(default_factory=list)
    tokens: int = 0
    """How many of the sequence's tokens are computed when what is wanted, or then found, is loaded."""
    own: int = 0
    """How many of those our own memory had."""
    computed: int = 0
    """How many tokens behind those the plan that loads them computes."""
    drop: bytes = b""
    """The names of the partial blocks among them, which the store may drop then."""
    awaited_by: list[Sequence] = field(default_factory=list)

    def move(self, state: LoadState) -> None:
        """Enters `state`. Raises IllegalTransition."""
        self.history = extend_history(NEXT_LOAD_STATES, self.history, state, f"load {self.lease}")
        self.state = state


class LoadOutcome(NamedTuple):
    """The end of a load. `sequence` continues with `tokens` loaded (None: it failed) and `computed` more behind them;
    `others` wait again."""

    sequence: Sequence | None
    tokens: int | None
    others: list[Sequence]
    computed: int = 0


class LoadSource(Protocol):
    """Where blocks are loaded from: the node's KV store, or a KV connector."""

    counters: EngineCounters

    @property
    def enabled(self) -> bool:
        """Whether there is one at all."""

    @property
    def attached(self) -> bool:
        """Whether it may be asked."""

    @property
    def usable_seconds(self) -> float:
        """How long what was found may wait to be loaded."""

    def holds(self, lease: LeaseId) -> bool:
        """Whether what was found under the lease is still kept."""

    def release(self, lease: LeaseId, drop: bytes = b"") -> None:
        """Ends the lease. `drop`: hash of a block that no other wants."""


class BlockLoads:
    """Owns what was found for which sequence, and the loads under way, wherever blocks come from."""

    def __init__(
        self,
        limits: EngineLimits,
        source: LoadSource,
        memory: BlockAllocator,
        transfers: BlockTransfers,
        costs: RecomputeCosts,
    ) -> None:
        self.enabled = source.enabled
        """Whether there is anything to load from; else nothing below need be called."""
        self.lookups: dict[SequenceId, PendingLoad] = {}
        """The loads in the states `requested` and `found`, by sequence."""
        self._limits = limits
        self._source = source
        self._memory = memory
        self._transfers = transfers
        self._costs = costs
        self._asked: dict[LeaseId, Sequence] = {}
        """Every request without a reply, wanted or not."""
        self._copying: dict[LeaseId, PendingLoad] = {}
        self._coming: dict[BlockHash, LeaseId] = {}
        """Full blocks that are being loaded, and by which load."""

    def look_up(self, sequence: Sequence) -> bool:
        """Asks the source, where it may have more than our own memory; whether it did. The sequence then waits for the
        reply."""
        sequence.transfer.seek()
        if not self._source.attached or len(self._asked) >= MAX_LOOKUPS_IN_FLIGHT:
            return False
        return self._look_up(sequence, _loadable(sequence))

    def _look_up(self, sequence: Sequence, tokens: int) -> bool:
        """Asks for what the first `tokens` need."""
        first = len(self._memory.cached_blocks(sequence))
        before = self.lookups.get(sequence.id)
        lookups = 0 if before is None else before.lookups
        if tokens <= first * self._memory.block_size or lookups >= MAX_LOOKUPS:
            return False
        wanted = self._memory.needed(sequence, first, tokens, sequence.transfer.partial)
        if not wanted:
            return False
        if before is not None:
            before.move("over")
            self._source.release(before.lease)
        if ends := self._memory.ends(sequence, first, tokens):
            lease = self._ask_any(ends)
        else:
            blocks = blocks_for(tokens, self._memory.block_size) - first
            lease = self._ask(sequence, first, blocks, [each.hash for each in wanted])
        self.lookups[sequence.id] = PendingLoad(lease, sequence, first, lookups + 1, wanted=wanted, tokens=tokens)
        self._asked[lease] = sequence
        return True

    def _ask_any(self, hashes: list[BlockHash]) -> LeaseId:
        """Asks which of `hashes` the source has; see `BlockAllocator.ends`."""
        raise NotImplementedError

    def _ask(self, sequence: Sequence, first: int, blocks: int, hashes: list[BlockHash]) -> LeaseId:
        """Asks for so many `blocks` of the sequence's tokens from its block `first` on, which the source knows as
        `hashes`."""
        raise NotImplementedError

    def _replied(self, lease: LeaseId) -> tuple[Sequence, PendingLoad] | None:
        """The lookup that a reply is for; None, and what it grants is released, where nobody waits for it."""
        sequence = self._asked.pop(lease, None)
        load = None if sequence is None else self.lookups.get(sequence.id)
        if sequence is None or load is None or load.lease != lease:
            self._source.release(lease)
            return None
        return sequence, load

    def _record_found(self, sequence: Sequence, load: PendingLoad, found: list[FoundBlock], now: float) -> None:
        """The reply to a lookup; `found` is empty for a miss."""
        if found:
            load.move("found")
            load.found = found
            load.found_at = now
            self._source.counters.hits += 1
        else:
            self._source.counters.misses += 1
            del self.lookups[sequence.id]
            load.move("over")
            self._source.release(load.lease)

    # ---- its turn

    def decide(self, sequence: Sequence, cached: int, now: float) -> LoadDecision:
        """What to do with the first in the queue, of which our own memory has `cached` blocks."""
        load = self.lookups.get(sequence.id)
        if load is None and sequence.transfer.unsought and self._pays(now):
            return "look again"
        if load is None or load.state != "found":
            return "compute"
        stale = not self._source.holds(load.lease) or now - load.found_at > self._source.usable_seconds
        if stale or cached < load.first:  # of what was before it, our own memory has lost some
            return "look again"
        missing = self._missing(load, cached)
        if not missing:
            return "compute"
        if missing[0].hash in self._coming:
            return "await"
        if not self._pays(now):
            return "compute"
        return "load" if self._transfers.room > 0 and self._memory.can_load else "compute"

    def _missing(self, load: PendingLoad, cached: int) -> list[FoundBlock]:
        """What was found behind the first `cached` blocks."""
        if cached * self._memory.block_size >= load.tokens:
            return []
        return load.found[bisect_left(load.found, cached * self._memory.tables, key=_place) :]

    def _pays(self, now: float) -> bool:
        """Whether loading is sooner than computing; counted where it is not."""
        pays = self._costs.load_pays(now)
        self._source.counters.loads_declined += not pays
        return pays

    def await_other(self, sequence: Sequence, cached: int) -> None:
        """The sequence waits until the load under way of the first block that it lacks has ended."""
        load = self.lookups[sequence.id]
        self._copying[self._coming[self._missing(load, cached)[0].hash]].awaited_by.append(sequence)

    def overlap(self, sequence: Sequence, cached: int, budget: int, now: float) -> int:
        """How many tokens, `budget` at most, the plan that loads the sequence's blocks may compute behind them; 0: it
        waits until they are there. Asked before `start`; our own memory has `cached` of its blocks."""
        return 0

    def start(self, sequence: Sequence, cached: list[int], now: float, overlap: int = 0) -> int:
        """Gives it blocks and has them filled. The caller has looked whether there are enough, and plans `overlap`
        tokens behind those in the same plan. Returns how many are in the blocks once they are filled."""
        load = self.lookups.pop(sequence.id)
        load.move("copying")
        blocks = self._memory.start_load(sequence, cached, load.tokens)
        copies = list(zip(blocks, self._missing(load, len(cached)), strict=True))
        load.own, load.computed = len(cached) // self._memory.tables * self._memory.block_size, overlap
        self._copy(load, sequence, len(cached), copies, now)
        lasts = self._lasting(load.tokens)
        load.names = [_LoadedBlock(each.place, each.hash, block) for block, each in copies if each.place < lasts]
        load.drop = b"".join([each.hash for _, each in copies if each.place >= lasts])
        sequence.transfer.forget_partial()
        self.record_return(sequence, loaded=True)
        self._coming.update((each.hash, load.lease) for each in load.names)
        self._copying[load.lease] = load
        return load.tokens

    def _lasting(self, tokens: int) -> int:
        """Records of places from here on are of a partial block, and of use to one sequence alone."""
        full, rest = divmod(tokens, self._memory.block_size)
        return full * self._memory.tables if rest else sys.maxsize

    def record_return(self, sequence: Sequence, *, loaded: bool) -> None:
        """A sequence is given blocks; counted where it was preempted before, by whether they are loaded."""
        if sequence.transfer.resume():
            self._source.counters.swapped_in += loaded
            self._source.counters.recomputed += not loaded

    def _copy(
        self, load: PendingLoad, sequence: Sequence, first: int, copies: list[tuple[int, FoundBlock]], now: float
    ) -> None:
        """Adds the transfer to the plan that is being made: what each block, the sequence's from `first` on, gets."""
        raise NotImplementedError

    def finish(self, lease: LeaseId, done: bool) -> LoadOutcome:
        """The load's transfer has ended; `done`: every rank has all blocks. Called before the transfer releases its
        blocks."""
        load = self._copying.pop(lease)
        load.move("over")
        for place, hash_, block in load.names:
            if self._coming.get(hash_) == lease:
                del self._coming[hash_]
            if done:
                self._memory.name_loaded(place, hash_, block)
        counters = self._source.counters
        if done:
            counters.blocks_loaded += len(load.names) + len(load.drop) // HASH_BYTES
            if load.sequence is not None:
                load.sequence.transfer.record_loaded(load.tokens - load.own)
        else:
            counters.loads_failed += 1
        self._source.release(lease, load.drop)
        others = [sequence for sequence in load.awaited_by if sequence.phase == "seeking"]
        return LoadOutcome(load.sequence, load.tokens if done else None, others, load.computed)

    # ---- the end

    def forget(self, sequence: Sequence) -> None:
        """It needs nothing from the store any more: it is computed, or has ended."""
        load = self.lookups.pop(sequence.id, None)
        if load is not None:
            found = load.state == "found"
            load.move("over")
            if found:  # else it is released when the reply comes
                lasts = self._lasting(load.tokens)
                self._source.release(load.lease, b"".join([each.hash for each in load.found if each.place >= lasts]))
        sequence.transfer.forget_partial()

    def give_up(self, lease: LeaseId) -> LoadOutcome:
        """Nobody waits for the load any longer, as if it had failed. The copying goes on."""
        load = self._copying[lease]
        for each in load.names:
            del self._coming[each.hash]
        others = [sequence for sequence in load.awaited_by if sequence.phase == "seeking"]
        outcome = LoadOutcome(load.sequence, None, others)
        load.sequence, load.awaited_by = None, []
        return outcome

    def leave(self, sequence: Sequence) -> None:
        """It ends while it is loaded: the copying goes on for others that may want the blocks."""
        for load in self._copying.values():
            if load.sequence is sequence:
                load.sequence = None

    def close(self) -> None:
        """The epoch is over: every lease is released. What ranks still read under one is used by no sequence."""
        for lease in self.leases:
            self._source.release(lease)

    @property
    def leases(self) -> set[LeaseId]:
        """All that are held, or will be once the store has replied."""
        return {*(load.lease for load in self.lookups.values()), *self._copying, *self._asked}


class Loads(BlockLoads):
    """Loads from the node's KV store."""

    def __init__(
        self,
        limits: EngineLimits,
        store: StoreClient,
        memory: BlockAllocator,
        transfers: BlockTransfers,
        costs: RecomputeCosts,
    ) -> None:
        super().__init__(limits, store, memory, transfers, costs)
        self._store = store

    def record_ends(self, lease: LeaseId, reply: KvStoreReply | None, now: float) -> Sequence | None:
        """The store has said behind which blocks the sequence could go on: then it is asked for what the longest
        beginning needs, or, as a lower tier may have that, for what all of it would. Returns the sequence where it can
        wait in the queue now, as in `record_reply`."""
        if (asked := self._replied(lease)) is None:
            return None
        sequence, load = asked
        if not isinstance(reply, FindAnyReply) or not self._store.holds(lease) or not self._store.attached:
            self._record_found(sequence, load, [], now)
            return sequence
        longest = reply.here.rfind(1) + 1
        if longest:
            load.tokens = (load.first + longest) * self._memory.block_size
            load.wanted = self._memory.needed(sequence, load.first, load.tokens, None)
        blocks = load.tokens // self._memory.block_size - load.first
        self._find(sequence, blocks, [each.hash for each in load.wanted], lease)
        self._asked[lease] = sequence
        return None

    def record_reply(self, lease: LeaseId, reply: KvStoreReply | None, now: float) -> Sequence | None:
        """The store has replied, or (None) has not in time. Returns the sequence that can wait in the queue now; None
        where it is not there any more."""
        if (asked := self._replied(lease)) is None:
            return None
        sequence, load = asked
        found: list[FoundBlock] = []
        if isinstance(reply, FindReply) and (arena := self._store.arena(reply)) is not None:
            load.arena = arena
            found = _found_blocks(load.wanted, reply)
            if len(found) < len(load.wanted):
                size, missing = self._memory.block_size, load.wanted[len(found)].place // self._memory.tables
                load.tokens = min(missing, (load.tokens - 1) // size) * size
                found = self._usable(sequence, load, found)
                if not found and self._look_up(sequence, load.tokens):
                    return None
        self._record_found(sequence, load, found, now)
        return sequence

    def _usable(self, sequence: Sequence, load: PendingLoad, found: list[FoundBlock]) -> list[FoundBlock]:
        """What the first tokens need of what was found for more of them; nothing where it is not all there. A window
        before fewer tokens begins earlier, at blocks that were not asked for, and a checkpoint behind fewer is another
        one: with the places that later blocks had, so it is names that tell."""
        there = {each.hash: each for each in found}
        needed = self._memory.needed(sequence, load.first, load.tokens, None)
        if not all(each.hash in there for each in needed):
            return []
        return [there[each.hash]._replace(place=each.place) for each in needed]

    def _ask_any(self, hashes: list[BlockHash]) -> LeaseId:
        return self._store.find_any(hashes, self._limits.store_deadline)

    def _ask(self, sequence: Sequence, first: int, blocks: int, hashes: list[BlockHash]) -> LeaseId:
        return self._find(sequence, blocks, hashes, None)

    def _find(self, sequence: Sequence, blocks: int, hashes: list[BlockHash], lease: LeaseId | None) -> LeaseId:
        source = sequence.transfer.kv_source
        remote = source is not None and source != self._store.node
        deadline = self._limits.store_deadline
        if remote:  # no longer than computing them would take
            deadline = max(deadline, self._costs.deadline(blocks, self._limits.remote_deadline))
        each = None if self._costs.block_seconds is None else self._costs.block_seconds * blocks / len(hashes)
        return self._store.find(hashes, deadline, source if remote else None, each, lease)

    def _copy(
        self, load: PendingLoad, sequence: Sequence, first: int, copies: list[tuple[int, FoundBlock]], now: float
    ) -> None:
        assert load.arena is not None
        slots = [BlockCopy(block, each.slot, each.generation) for block, each in copies]
        self._transfers.add("load", load.lease, load.arena, slots, now)


def _loadable(sequence: Sequence) -> int:
    """Tokens in its full blocks that need not be computed, with those of the partial one that was handed over with
    it."""
    full = min(sequence.reusable_blocks, len(sequence.tokens.hashes))
    whole = full == sequence.reusable_blocks and sequence.transfer.partial is not None
    return sequence.reusable if whole else full * sequence.tokens.block_size


def _found_blocks(wanted: list[NamedBlock], found: FindReply) -> list[FoundBlock]:
    """The leading ones of what is `wanted` that the reply contains. Raises ValueError if the reply contradicts
    itself."""
    slots = unpack(found.slots)
    generations = unpack_generations(found.generations)
    if len(slots) != len(generations):
        raise ValueError(f"{len(slots)} slots have {len(generations)} generations")
    triples = zip(wanted, slots, generations, strict=False)
    return [FoundBlock(each.hash, slot, generation, each.place) for each, slot, generation in triples]


def _place(found: FoundBlock) -> int:
    return found.place
