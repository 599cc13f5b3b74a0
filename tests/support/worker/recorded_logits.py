"""What a model runner is about to draw from, for comparing it with what it should be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.executor import runner
from services.worker.executor.host_runner import HostRunner
from services.worker.graphs.host_decodes import HostDecode
from services.worker.sampling.history import HistoryLookup
from services.worker.sampling.parameters import SamplingBatch
from services.worker.sampling.sampler import SamplerOutput, sample
from tests.support.models.tiny_models import TinyModel
from tests.support.worker.plan_driver import Driver, Sequence


def record_logits(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The logits of every step from here on, before anything is done to them."""
    record: list[Tensor] = []

    def recording(logits: Tensor, choices: SamplingBatch, history: HistoryLookup, *kernels: Any) -> SamplerOutput:
        record.append(logits.clone())
        return sample(logits, choices, history, *kernels)

    compute = HostDecode.compute

    def computing(step: HostDecode) -> float:
        seconds = compute(step)
        record.append(step.logits.clone())
        return seconds

    monkeypatch.setattr(runner, "sample", recording)
    monkeypatch.setattr(HostDecode, "compute", computing)
    return record


def last_logits(backend: HostRunner, prompt: list[int], recorded: list[Tensor]) -> Tensor:
    """Those behind `prompt`; `recorded` is what `record_logits` gave."""
    driver = Driver(backend)
    driver.add(prompt, 1)
    recorded.clear()
    driver.run()
    backend.reset()
    return recorded[0][0]


def assert_logits_agree(
    backend: HostRunner, model: TinyModel, prompt: list[int], output: int, recorded: list[Tensor], budget: int = 512
) -> Sequence:
    """Those of `prompt`, in steps of `budget` tokens, and of the `output` tokens that follow it are the reference's.
    `recorded` is what `record_logits` gave."""
    driver = Driver(backend, budget=budget)
    recorded.clear()  # what it tried when it was started
    sequence = driver.add(prompt, output)
    driver.run()
    expected = model.logits(sequence.tokens)[len(prompt) - 1 : -1]
    assert torch.cat(recorded[-output:]).sub(expected).abs().max() < 1e-3
    assert expected.std() > 0.3, "a reference this flat would agree with anything"
    return sequence
