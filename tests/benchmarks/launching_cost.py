"""What a worker's host spends on a step that is launched ahead: milliseconds of CPU by batch size.

    python -m tests.benchmarks.launching_cost

The runner that GPUs are served with, on a CPU, with a forward pass that computes nothing: what is left is preparing
rows, drawing greedily from a small vocabulary, and telling what was drawn.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from services.worker.backend import Step, StepOutput
from services.worker.executor.device_runner import DeviceRunner
from services.worker.ops.interface import BatchMeta
from shared.messages.worker import StepPlan
from tests.support.models.tiny_models import make_model
from tests.support.worker.launched_rank import DriverAhead, begin_step, launching
from tests.support.worker.tiny_backend import tiny_backend

SIZES = (1, 16, 64, 256)
PROMPT, OUTPUT = 40, 200
BEFORE, STEPS = 40, 120
"""Steps until everybody decodes, and those that are counted."""


class _Timed:
    """A step whose telling is timed, too."""

    def __init__(self, step: Step, told: list[float]) -> None:
        self._step, self._told = step, told

    def output(self) -> StepOutput:
        started = time.thread_time()
        output = self._step.result()
        self._told.append(time.thread_time() - started)
        return output


class TimedRunner(DeviceRunner):
    """Notes what beginning and telling each step takes."""

    begun: list[float]
    told: list[float]

    def begin(self, plan: StepPlan) -> Step:
        started = time.thread_time()
        step = begin_step(self, plan)
        self.begun.append(time.thread_time() - started)
        return _Timed(step, self.told)


def without_computing(runner: DeviceRunner) -> TimedRunner:
    """The same rank, whose model says at once what it always says."""
    rank: Any = runner.rank
    logits = torch.randn(max(SIZES), rank.card.vocab_size)

    def forward(ids: Tensor, meta: BatchMeta) -> tuple[Tensor, None]:
        return logits[torch.arange(len(meta.logits_rows)) % len(logits)], None

    rank.forward = forward
    return TimedRunner(rank)


def measure(runner: TimedRunner, sequences: int) -> None:
    runner.reset()
    runner.begun, runner.told = [], []
    driver, chance = DriverAhead(runner, budget=8192), Random(0)
    for _ in range(sequences):
        driver.add([chance.randrange(3, runner.card.vocab_size) for _ in range(PROMPT)], wanted=OUTPUT)
    for _ in range(BEFORE + STEPS):
        driver.step()
    driver.finish()
    shown = [
        f"{name} {statistics.median(times[BEFORE:]) * 1e3:.2f} ms (p90 {_p90(times[BEFORE:]) * 1e3:.2f})"
        for name, times in (("begin", runner.begun), ("tell", runner.told))
    ]
    print(f"{sequences:4} sequences: {', '.join(shown)}")


def _p90(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.9)]


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_model("llama", Path(folder))
        settings = {"max_num_seqs": max(SIZES), "max_batch_tokens": 8192, "kv_memory_bytes": 256 << 20}
        runner = without_computing(launching(tiny_backend(Path(folder), **settings)))
        for sequences in SIZES:
            measure(runner, sequences)


if __name__ == "__main__":
    main()
