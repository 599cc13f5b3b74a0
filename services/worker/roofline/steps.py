"""Measures a model's steps on the decoder, caches and runner that serve, beside the ceilings of the same run."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from services.worker.roofline.batches import batch_of, blocks_needed
from services.worker.roofline.ceilings import measure_ceilings
from services.worker.roofline.chosen import chosen, give_back, started
from services.worker.roofline.findings import (
    Ceilings,
    Finding,
    StepCase,
    StepMeasured,
    StepsAsked,
    StepSkipped,
    Work,
)
from services.worker.roofline.measured_rank import MeasuredRank, communicator_of, load
from services.worker.roofline.stopwatch import Stopwatch
from services.worker.roofline.traffic import StepWork
from services.worker.roofline.whole_steps import WholeSteps

_BATCHES = {"cpu": (1, 4, 16, 64), "cuda": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)}
_CONTEXTS = {"cpu": (128, 1024, 4096), "cuda": (128, 1024, 4096, 8192, 32768)}
_PREFILLS = {"cpu": (128, 512, 2048), "cuda": (512, 2048, 8192)}
_CEILINGS_SHARE = 0.1
"""Of the seconds that are given, before the steps and again behind them."""
_WHOLE_RUNS = 10
_WORST = 4.0
"""A step is left out where it would not end in time though it ran at a quarter of the limit."""


def measure_steps(asked: StepsAsked) -> Iterator[Finding]:
    """What is found, as it is found. Raises CannotMeasure."""
    with chosen(asked) as made, torch.inference_mode():
        yield started(made)
        communicator = communicator_of(asked, made.device)
        watch = Stopwatch(made.device, communicator.least, cpu_time=asked.cpu_time)
        ceilings = measure_ceilings(watch, made.device, made.dtype, asked.seconds * _CEILINGS_SHARE)
        yield ceilings
        give_back(made.device)
        cases = cases_of(asked, made.device.type)
        loaded = load(asked, made, communicator)
        room = loaded.blocks_that_fit
        fitting = [blocks_needed(case) for case in cases if case.context <= made.config.max_positions]
        blocks = max((needed for needed in fitting if needed <= room), default=1)
        yield loaded.ready(blocks)
        steps = _Steps(loaded, ceilings, watch, asked.seconds * (1 - 2 * _CEILINGS_SHARE), blocks, cases)
        for case in cases:
            yield steps.measure(case, room)
        del steps
        give_back(made.device)
        again = measure_ceilings(watch, made.device, made.dtype, asked.seconds * _CEILINGS_SHARE)
        yield ceilings.best_of(again)


def cases_of(asked: StepsAsked, device: str) -> list[StepCase]:
    """Decodes by context, then prompts."""
    batches = _BATCHES[device] if asked.batches is None else asked.batches
    contexts = _CONTEXTS[device] if asked.contexts is None else asked.contexts
    prefills = _PREFILLS[device] if asked.prefills is None else asked.prefills
    decodes = [StepCase("decode", batch, context) for context in contexts for batch in batches]
    return decodes + [StepCase("prefill", 1, length) for length in prefills]


class _Steps:
    """Owns the runner, and what is left of the time."""

    def __init__(
        self,
        loaded: MeasuredRank,
        ceilings: Ceilings,
        watch: Stopwatch,
        seconds: float,
        blocks: int,
        cases: list[StepCase],
    ) -> None:
        self._loaded = loaded
        self._ceilings = ceilings
        self._left = len(cases)
        self._watch = watch
        self._runner = loaded.runner(blocks, {case.batch for case in cases})
        self._whole = WholeSteps(self._runner, watch.clock)
        self._end = time.perf_counter() + seconds

    def measure(self, case: StepCase, room: int) -> StepMeasured | StepSkipped:
        """`room`: blocks of KV memory that there could be."""
        share = max(0.0, self._end - time.perf_counter()) / self._left
        self._left -= 1
        needed = self._loaded.traffic.step(case)
        reason = self._reason(case, needed, room)
        if reason is not None:
            return StepSkipped(case, reason)
        rank, vocabulary = self._runner.rank, self._runner.card.vocab_size
        ids, meta = batch_of(case, self._runner.num_blocks, vocabulary, rank.device)
        begun = time.perf_counter()
        forward = self._watch.timed(lambda: rank.forward(ids, meta), share / 2)
        each = (time.perf_counter() - begun) / (forward.runs + 1)
        runs = max(1, min(_WHOLE_RUNS, int(share / 2 / each)))
        whole = self._whole.timed(case, self._loaded.communicator.least(runs))
        return StepMeasured(
            case=case,
            weight_bytes=needed.weight_bytes,
            kv_read_bytes=needed.kv_read_bytes,
            kv_written_bytes=needed.kv_written_bytes,
            flops=needed.flops,
            forward=forward,
            whole=whole,
        )

    def _reason(self, case: StepCase, needed: StepWork, room: int) -> str | None:
        """Why it cannot be measured."""
        longest = self._runner.card.max_model_len
        if case.context > longest:
            return f"the model has {longest} positions"
        if blocks_needed(case) > self._runner.num_blocks:
            size = self._loaded.block_bytes / 2**30
            return f"{blocks_needed(case) * size:.1f} GiB of KV memory, {room * size:.1f} GiB are free"
        moved = needed.weight_bytes + needed.kv_read_bytes + needed.kv_written_bytes
        likely = self._ceilings.seconds(Work(moved, needed.flops)) * _WORST
        in_time = int(time.perf_counter() + 2 * likely < self._end)
        # Ranks whose clocks differ leave out the same.
        return None if self._loaded.communicator.least(in_time) else f"it may take {2 * likely:.0f} s, and time is up"
