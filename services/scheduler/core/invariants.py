"""What must be true after every event. Checked by tests after each, and by the actor when the engine is idle."""

from __future__ import annotations

from collections import Counter

from services.scheduler.core.engine import EngineCore
from services.scheduler.core.epoch import EpochState
from services.scheduler.core.memory import BlockAllocator
from services.scheduler.core.sequence import Sequence
from shared.blocks import blocks_for


class BrokenInvariant(AssertionError):
    """A bug in the core; the text says which promise does not hold."""


def _hold(promise: bool, text: str) -> None:
    if not promise:
        raise BrokenInvariant(text)


def check(engine: EngineCore) -> None:
    """Checks all promises of an engine at rest. Raises BrokenInvariant."""
    state = engine.epoch_state
    if state is None:
        _hold(not engine.requests, "without workers no request is held")
        return
    sequences = list(engine.requests.values())
    kept = [] if state.transfers.connector_saves is None else state.transfers.connector_saves.blocks
    check_memory(state.memory, sequences, [*state.transfers.copies.blocks, *kept])
    _check_queues(state, sequences)
    for sequence in sequences:
        _check_sequence(sequence, state.memory.tables, sequence.id in state.queues.introduced, _max_reserved(state))
        if state.steps.in_flight == 0:
            _hold(not sequence.tokens.in_flight, f"{sequence.id} awaits a token, but no step is in flight")
    if state.steps.in_flight == 0 and not state.planner.waits_elsewhere and engine.plan_due is None:
        waits = engine.paused == "all" or (engine.paused == "new" and not state.queues.running)
        _hold(waits or not engine.requests, "requests are held, but nothing is being computed")
    _check_store(engine, state)


def check_memory(memory: BlockAllocator, sequences: list[Sequence], copied: list[int]) -> None:
    """The pool's counts agree with the tables and the transfers (`copied`: a block for each reference of theirs), and
    nothing is shared that is not known to the index. Raises BrokenInvariant."""
    pool, index = memory.pool, memory.index
    tables = Counter(memory.blocks_in_use(sequences))
    used = tables + Counter(copied)
    # All blocks of a pool may be hundreds of thousands: they are gone through only where C does it.
    _hold(len(pool.blank) + len(pool.cached) + len(used) == pool.total, "free + cached + in use differs from the total")
    _hold(len({*pool.blank, *pool.cached, *used}) == pool.total, "a block is in two places")
    for block, references in used.items():
        _hold(pool.references[block] == references, f"block {block}: references differ from tables and transfers")
    others = len(used) + pool.references.count(0) - pool.total
    _hold(others == 0, "a block that no table and no transfer has is referenced")
    for block, held in tables.items():
        shared = held < 2 or block in index.hash_of or block in pool.forgotten
        _hold(shared, f"block {block} is in two tables, but was never shared")
    _hold(index.hash_of.keys() >= pool.cached.keys(), "a cached block is not in the index")
    _hold(index.hash_of.keys().isdisjoint(pool.blank), "a blank block is in the index")
    _hold(index.is_consistent, "the index's two sides differ")


def _check_queues(state: EpochState, sequences: list[Sequence]) -> None:
    queues = state.queues
    _hold(state.grammars.waiting == queues.compiling, "grammars are waited for by others than those compiling")
    beside = {
        "compiling": queues.compiling,
        "seeking": queues.seeking,
        "loading": queues.loading,
        "handing": queues.handing,
    }
    for phase, members in beside.items():
        _hold(members == {s.id: s for s in sequences if s.phase == phase}, f"those {phase}")
    in_order = {
        "waiting": queues.waiting,
        "quarantined": queues.suspects,
        "prefilling": queues.prefilling,
        "decoding": queues.decoding,
    }
    for phase, queue in in_order.items():
        queued = list(queue)
        _hold(sorted(s.id for s in sequences if s.phase == phase) == sorted(s.id for s in queued), f"{phase} queue")
        _hold(queued == sorted(queued, key=lambda s: s.queue_key), f"the {phase} queue is out of order")
    _hold(not any(s.phase == "ended" for s in sequences), "an ended request is still held")
    _hold({s.id: s for s in sequences} == queues.by_id, "numbers and requests differ")
    _hold(queues.introduced <= queues.by_id.keys(), "the workers know sequences that have ended")
    _hold(queues.running <= state.limits.max_running, "more run than may")


def _max_reserved(state: EpochState) -> int:
    """Tokens beyond `planned` for which a decoding sequence may hold blocks: drafts of as many steps as may be in
    flight, had they been accepted."""
    workers = state.workers
    return max(workers.max_speculate, workers.max_jump_ahead) * (state.limits.plans_ahead + 1)


def _check_sequence(sequence: Sequence, tables: int, introduced: bool, max_reserved: int) -> None:
    name, tokens = f"sequence {sequence.id}", sequence.tokens
    known, full, size = len(tokens.known), len(sequence.blocks.numbers) // tables, tokens.block_size
    _hold(known <= tokens.length <= tokens.limit, f"{name}: lengths {known}, {tokens.length}, {tokens.limit}")
    _hold(tokens.planned <= sequence.blocks.capacity == full * size, f"{name}: planned beyond its blocks")
    if sequence.phase == "loading":
        _hold(full > blocks_for(tokens.planned, size), f"{name}: is loaded into no blocks")
    else:
        most = blocks_for(tokens.planned + (max_reserved if sequence.phase == "decoding" else 0), size)
        _hold(blocks_for(tokens.planned, size) <= full <= most, f"{name}: holds blocks that it has no tokens for")
    hashed = known // size if sequence.generation.prefix_caching else 0
    _hold(len(tokens.hashes) == hashed, f"{name}: hashes")
    if sequence.phase in ("waiting", "quarantined", "compiling", "seeking", "returning"):
        _hold(full == 0, f"{name}: holds blocks while it waits")
        _hold(not introduced, f"{name}: the workers know it while it waits")
    if sequence.phase in ("waiting", "quarantined", "compiling", "seeking", "loading", "prefilling"):
        _hold(known == tokens.length and tokens.planned < known, f"{name}: nothing to prefill")
    if sequence.phase in ("decoding", "handing"):
        _hold(tokens.planned == tokens.length - 1, f"{name}: decodes one token behind")
    if sequence.phase == "returning":
        _hold(tokens.in_flight, f"{name}: returns, but awaits no token")


def _check_store(engine: EngineCore, state: EpochState) -> None:
    """Every lease belongs to a load, a save or a kept prompt."""
    transfers, in_flight = state.transfers, state.transfers.copies.in_flight
    used = transfers.loads.leases | transfers.saves.leases | transfers.keeper.leases
    _hold(
        engine.store.held <= used,
        f"leases {set(engine.store.held - used)} belong to no load, no save and no kept prompt",
    )
    _hold(
        transfers.saves.copying <= len(in_flight),
        "more saves are copied than there are transfers",
    )
    if engine.idle:
        _hold(not in_flight, "blocks are copied though nothing is in hand")
