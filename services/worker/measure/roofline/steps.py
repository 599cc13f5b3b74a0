"""Measures a model's steps on the decoder, caches and runner that serve, beside the ceilings of the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random

import numpy as np
import torch

from services.worker.backend import Step
from services.worker.executor.runner_parts import Runner
from services.worker.measure.roofline.cases import batch_of, blocks_needed
from services.worker.measure.roofline.ceilings import Stopwatch, measure_ceilings
from services.worker.measure.roofline.measured_rank import (
    MeasuredRank,
    communicator_of,
    describe_start,
    load,
    open_measured_model,
)
from services.worker.measure.roofline.traffic import StepWork
from services.worker.measure.roofline.wire import (
    Ceilings,
    Finding,
    KernelWork,
    StepCase,
    StepMeasured,
    StepSkipped,
    StepsRequest,
    Timing,
)
from shared.blocks import blocks_for
from shared.ids import Incarnation, SequenceId
from shared.messages.generation import SamplingOptions
from shared.messages.worker import NewSequence, SequenceWork, StepPlan
from shared.packing import pack

_BATCHES = {"cpu": (1, 4, 16, 64), "cuda": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)}
_CONTEXTS = {"cpu": (128, 1024, 4096), "cuda": (128, 1024, 4096, 8192, 32768)}
_PREFILLS = {"cpu": (128, 512, 2048), "cuda": (512, 2048, 8192)}
_CEILINGS_SHARE = 0.1
"""Share of the given seconds for measuring the limits, once before and once after the steps."""
_WHOLE_RUNS = 10
_WORST = 4.0
"""A step is left out where it would not end in time though it ran at a quarter of the limit."""


def measure_steps(request: StepsRequest) -> Iterator[Finding]:
    """Yields findings as they are made. Raises CannotMeasure."""
    with open_measured_model(request) as measured, torch.inference_mode():
        yield describe_start(measured)
        communicator = communicator_of(request, measured.platform)
        watch = Stopwatch(measured.device, communicator.minimum, cpu_time=request.cpu_time)
        ceilings = measure_ceilings(watch, measured.device, measured.dtype, request.seconds * _CEILINGS_SHARE)
        yield ceilings
        measured.platform.empty_cache()
        cases = cases_of(request, measured.device.type)
        loaded = load(request, measured, communicator)
        room = loaded.blocks_that_fit
        fitting = [
            blocks_needed(case, request.block_size) for case in cases if case.context <= measured.config.max_positions
        ]
        blocks = max((needed for needed in fitting if needed <= room), default=1)
        yield loaded.ready(blocks)
        steps = _Steps(loaded, ceilings, watch, request.seconds * (1 - 2 * _CEILINGS_SHARE), blocks, cases)
        for case in cases:
            yield steps.measure(case, room)
        del steps
        measured.platform.empty_cache()
        again = measure_ceilings(watch, measured.device, measured.dtype, request.seconds * _CEILINGS_SHARE)
        yield ceilings.best_of(again)


def cases_of(request: StepsRequest, device: str) -> list[StepCase]:
    """Decodes by context, then prompts."""
    batches = _BATCHES[device] if request.batches is None else request.batches
    contexts = _CONTEXTS[device] if request.contexts is None else request.contexts
    prefills = _PREFILLS[device] if request.prefills is None else request.prefills
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
        ids, meta = batch_of(case, self._runner.num_blocks, vocabulary, rank.device, self._runner.card.block_size)
        begun = time.perf_counter()
        forward = self._watch.timed(lambda: rank.forward(ids, meta), share / 2)
        each = (time.perf_counter() - begun) / (forward.runs + 1)
        runs = max(1, min(_WHOLE_RUNS, int(share / 2 / each)))
        whole = self._whole.timed(case, self._loaded.communicator.minimum(runs))
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
        if (blocks := blocks_needed(case, self._runner.card.block_size)) > self._runner.num_blocks:
            size = self._loaded.block_bytes / 2**30
            return f"{blocks * size:.1f} GiB of KV memory, {room * size:.1f} GiB are free"
        moved = needed.weight_bytes + needed.kv_read_bytes + needed.kv_written_bytes
        likely = self._ceilings.seconds(KernelWork(moved, needed.flops)) * _WORST
        in_time = int(time.perf_counter() + 2 * likely < self._end)
        # Ranks whose clocks differ leave out the same.
        return None if self._loaded.communicator.minimum(in_time) else f"it may take {2 * likely:.0f} s, and time is up"


# Whole steps of a rank, from a scheduler's plan to the tokens drawn: bookkeeping, forward pass and sampling.


_EPOCH = Incarnation(1)


class WholeSteps:
    """Plays scheduler to `runner`, whose sequences and blocks are its own."""

    def __init__(self, runner: Runner, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._clock = clock
        self._random = Random(1)
        self._tokens = np.random.default_rng(1)
        self._step = 0

    def timed(self, case: StepCase, runs: int) -> Timing:
        """By the clock, one step behind the other as a worker computes them: the next is prepared, where the device
        lets it, before the last is reported."""
        self._runner.reset()
        taken = self._decodes(case, runs) if case.kind == "decode" else self._prefills(case, runs)
        self._runner.reset()
        return Timing(statistics.median(taken), min(taken), len(taken))

    def _decodes(self, case: StepCase, runs: int) -> list[float]:
        """So many, up to the context that is asked for, behind two that do not count."""
        runs = min(runs, max(1, case.context - 2))
        first = max(1, case.context - runs - 1)
        tables = self._tables(case)
        sequences = [SequenceId(number) for number in range(case.batch)]
        new = tuple(self._new(each, first, first - 1, tables[each]) for each in sequences)
        work = tuple(SequenceWork(each, 1, b"", True) for each in sequences)
        return self._seconds_between_results(
            [self._plan(new=new, work=work), *(self._plan(work=work) for _ in range(runs + 1))]
        )

    def _prefills(self, case: StepCase, runs: int) -> list[float]:
        sequences = [SequenceId(number) for number in range(case.batch)]
        plans = []
        for number in range(runs + 2):
            tables = self._tables(case)
            plans.append(
                self._plan(
                    released=tuple(sequences) if number else (),
                    new=tuple(self._new(each, case.context, 0, tables[each]) for each in sequences),
                    work=tuple(SequenceWork(each, case.context, b"", True) for each in sequences),
                )
            )
        return self._seconds_between_results(plans)

    def _seconds_between_results(self, plans: list[StepPlan]) -> list[float]:
        """Seconds from one answer to the next, of all plans but the first two. A processor computes a step while it
        begins it, a device by itself: either way an answer comes when one more step is begun."""
        pending, marks = self._begin(plans[0]), []
        for plan in plans[1:]:
            following = self._begin(plan)
            pending.result()
            marks.append(self._clock())
            pending = following
        pending.result()
        return [after - before for before, after in pairwise(marks)]

    def _begin(self, plan: StepPlan) -> Step:
        step = self._runner.prepare(plan)
        step.launch()
        return step

    def _tables(self, case: StepCase) -> list[bytes]:
        """Packed block ids of each sequence, anywhere."""
        width = blocks_for(case.context, self._runner.card.block_size)
        ids = self._random.sample(range(self._runner.num_blocks), case.batch * width)
        return [pack(ids[at : at + width]) for at in range(0, len(ids), width)]

    def _new(self, sequence: SequenceId, length: int, computed: int, blocks: bytes) -> NewSequence:
        vocabulary = self._runner.card.vocab_size
        tokens = self._tokens.integers(vocabulary, size=length).astype("<u4").tobytes()
        return NewSequence(
            sequence=sequence,
            tokens=tokens,
            prompt_length=length,
            computed=computed,
            blocks=blocks,
            sampling=SamplingOptions(seed=int(sequence)),
        )

    def _plan(
        self,
        *,
        released: tuple[SequenceId, ...] = (),
        new: tuple[NewSequence, ...] = (),
        work: tuple[SequenceWork, ...] = (),
    ) -> StepPlan:
        plan = StepPlan(epoch=_EPOCH, step=self._step, released=released, new=new, work=work)
        self._step += 1
        return plan
