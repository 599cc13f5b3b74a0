"""What must be true after every event. Called by tests after each, and by the actor when the engine is idle."""

from __future__ import annotations

from collections import Counter

from services.scheduler.core.engine import Engine
from services.scheduler.core.kv_memory import KvMemory
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.serving import Serving
from shared.blocks import BLOCK_SIZE, blocks_for


class BrokenInvariant(AssertionError):
    """A bug in the core; the text says which promise does not hold."""


def _hold(promise: bool, text: str) -> None:
    if not promise:
        raise BrokenInvariant(text)


def check(engine: Engine) -> None:
    """Raises BrokenInvariant."""
    if engine.serving is None:
        _hold(not engine.requests, "without workers no request is held")
        return
    planner = engine.serving.planner
    sequences = list(engine.requests.values())
    check_memory(planner.memory, sequences, list(engine.serving.transfers.blocks))
    _check_lines(engine.serving, sequences)
    for sequence in sequences:
        _check_sequence(sequence, most_reserved=_most_reserved(engine.serving))
        if engine.serving.steps.in_flight == 0:
            _hold(not sequence.awaits_token, f"{sequence.id} awaits a token, but no step is in flight")
    if engine.serving.steps.in_flight == 0 and not planner.waits_elsewhere:
        _hold(not engine.requests, "requests are held, but nothing is being computed")
    _check_store(engine, engine.serving)


def check_memory(memory: KvMemory, sequences: list[Sequence], copied: list[int]) -> None:
    """The pool's counts agree with the tables and the transfers (`copied`: a block for each reference of theirs), and
    nothing is shared that is not known to the index."""
    pool, index = memory.pool, memory.index
    blank, cached = list(pool.blank), list(pool.cached)
    tables = Counter(block for sequence in sequences for block in sequence.blocks)
    used = tables + Counter(copied)
    _hold(len(blank) + len(cached) + len(used) == pool.total, "free + cached + in use differs from the total")
    _hold(len({*blank, *cached, *used}) == pool.total, "a block is in two places")
    for block in range(pool.total):
        _hold(pool.references[block] == used[block], f"block {block}: references differ from tables and transfers")
        _hold(tables[block] < 2 or index.holds(block), f"block {block} is in two tables, but was never shared")
    _hold(all(index.holds(b) for b in cached), "a cached block is not in the index")
    _hold(not any(index.holds(b) for b in blank), "a blank block is in the index")
    _hold({h: b for b, h in index.hash_of.items()} == index.block_of, "the index's two sides differ")


def _check_lines(serving: Serving, sequences: list[Sequence]) -> None:
    places, limits = serving.planner.places, serving.limits
    _hold(serving.grammars.waiting == places.compiling, "grammars are waited for by others than those compiling")
    beside = {
        "compiling": places.compiling,
        "seeking": places.seeking,
        "loading": places.loading,
        "handing": places.handing,
    }
    for phase, members in beside.items():
        _hold(members == {s.id: s for s in sequences if s.phase == phase}, f"those {phase}")
    lines = {"waiting": places.waiting, "prefilling": places.prefilling, "decoding": places.decoding}
    for phase, line in lines.items():
        in_line = list(line)
        _hold(sorted(s.id for s in sequences if s.phase == phase) == sorted(s.id for s in in_line), f"{phase} line")
        _hold(in_line == sorted(in_line, key=lambda s: s.rank), f"the {phase} line is out of order")
    _hold(not any(s.phase == "ended" for s in sequences), "an ended request is still held")
    _hold({s.id: s for s in sequences} == places.by_id, "numbers and requests differ")
    _hold(places.running <= limits.max_running, "more run than may")


def _most_reserved(serving: Serving) -> int:
    """Tokens beyond `planned` for which a decoding sequence may hold blocks: drafts of as many steps as may be in
    flight, had they been accepted."""
    workers = serving.workers
    return max(workers.max_speculate, workers.max_jump_ahead) * (serving.limits.plans_ahead + 1)


def _check_sequence(sequence: Sequence, most_reserved: int) -> None:
    name = f"sequence {sequence.id}"
    known, full = len(sequence.tokens), len(sequence.blocks)
    _hold(known <= sequence.length <= sequence.limit, f"{name}: lengths {known}, {sequence.length}, {sequence.limit}")
    _hold(sequence.planned <= sequence.capacity == full * BLOCK_SIZE, f"{name}: planned beyond its blocks")
    if sequence.phase == "loading":
        _hold(full > blocks_for(sequence.planned), f"{name}: is loaded into no blocks")
    else:
        most = blocks_for(sequence.planned + (most_reserved if sequence.phase == "decoding" else 0))
        _hold(blocks_for(sequence.planned) <= full <= most, f"{name}: holds blocks that it has no tokens for")
    _hold(len(sequence.hashes) == known // BLOCK_SIZE, f"{name}: hashes")
    if sequence.phase in ("waiting", "compiling", "seeking", "returning"):
        _hold(full == 0, f"{name}: holds blocks while it waits")
        _hold(not sequence.introduced, f"{name}: the workers know it while it waits")
    if sequence.phase in ("waiting", "compiling", "seeking", "loading", "prefilling"):
        _hold(known == sequence.length and sequence.planned < known, f"{name}: nothing to prefill")
    if sequence.phase in ("decoding", "handing"):
        _hold(sequence.planned == sequence.length - 1, f"{name}: decodes one token behind")
    if sequence.phase == "returning":
        _hold(sequence.awaits_token, f"{name}: returns, but awaits no token")


def _check_store(engine: Engine, serving: Serving) -> None:
    """Every lease is somebody's, and with nothing in hand none is held."""
    used = serving.loads.leases | serving.saves.leases
    _hold(engine.store.held <= used, f"leases {set(engine.store.held - used)} are nobody's")
    _hold(serving.saves.copying <= len(serving.transfers), "more saves are being copied than there are transfers")
    if engine.idle:
        _hold(not len(serving.transfers), "blocks are copied for nobody")
