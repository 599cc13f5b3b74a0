"""A picture of an engine for people who look at it, bounded, however much the engine holds. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice

from services.scheduler.core.engine import EngineCore
from services.scheduler.core.epoch import EpochState
from services.scheduler.core.health.canary import CANARY_DETOKENIZER
from services.scheduler.core.planning.step_timing import FinishedStep
from services.scheduler.core.sequence import Sequence
from shared.messages.scheduler import BlockMap, EnginePicture, SequencePicture, StepPicture

MAX_CELLS = 1024
"""Blocks that a map shows; of a larger pool every second, third and so on."""
MAX_SEQUENCES = 32
"""Requests that are shown of those that wait, and of those that run."""
FREE, CACHED, IN_USE, SHARED, LOADING = range(5)


def engine_picture(engine: EngineCore) -> EnginePicture:
    """Returns what the engine holds, and its last steps. It takes time by the bounds above, not by the pool's size, but
    for the blocks that are being loaded."""
    state = engine.epoch_state
    if state is None:
        return EnginePicture(blocks=None)
    queues = state.queues
    waiting = chain(queues.waiting, queues.suspects, queues.seeking.values(), queues.compiling.values())
    running = chain(queues.prefilling, queues.loading.values(), queues.handing.values(), queues.decoding)
    return EnginePicture(
        blocks=block_map(state),
        block_size=state.workers.card.block_size,
        max_batch_tokens=state.limits.max_batch_tokens,
        steps=tuple(map(_step, state.recent_steps)),
        waiting=tuple(_sequences(waiting)),
        running=tuple(_sequences(running)),
        queued=engine.waiting,
        computing=max(0, engine.load - engine.waiting),
    )


def block_map(state: EpochState) -> BlockMap:
    """Returns what the blocks are used for: of all of them the sums, of some each."""
    pool = state.memory.pool
    loading = {
        block
        for transfer in state.transfers.copies.in_flight
        if transfer.kind == "load" and not transfer.over
        for block in transfer.blocks
    }
    every = max(1, -(-pool.total // MAX_CELLS))
    cells = bytearray(len(range(0, pool.total, every)))
    for cell, references in enumerate(pool.references[::every]):
        block = cell * every
        if references == 0:
            cells[cell] = CACHED if block in pool.cached else FREE
        elif block in loading:
            cells[cell] = LOADING
        else:
            cells[cell] = IN_USE if references == 1 else SHARED
    return BlockMap(
        total=pool.total,
        free=len(pool.blank),
        cached=len(pool.cached),
        loading=len(loading),
        every=every,
        cells=bytes(cells),
    )


def _step(step: FinishedStep) -> StepPicture:
    counts = [work.count for work in step.work]
    return StepPicture(
        step=step.step,
        seconds=step.seconds,
        prefill_tokens=sum(counts[step.decodes :]),
        decode_tokens=sum(counts[: step.decodes]),
        prefills=len(counts) - step.decodes,
        decodes=step.decodes,
        drafted=step.drafted,
        accepted=sum(step.accepted),
        timing=step.timing,
    )


def _sequences(sequences: Iterable[Sequence]) -> Iterator[SequencePicture]:
    of_clients = (each for each in sequences if each.detokenizer != CANARY_DETOKENIZER)
    for each in islice(of_clients, MAX_SEQUENCES):
        yield SequencePicture(
            request=each.generation.request,
            phase=each.phase,
            arrival=each.generation.arrival,
            priority=each.generation.priority,
            prompt_tokens=each.tokens.prompt_length,
            computed_tokens=each.tokens.planned,
            output_tokens=max(0, each.tokens.produced),
            cached_tokens=each.stream.cached_tokens,
            blocks=len(each.blocks.numbers),
        )
