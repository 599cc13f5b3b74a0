"""What a model runner is about to draw from, for comparing it with what it should be."""

from __future__ import annotations

import pytest
from torch import Tensor

from services.worker import launching_runner, model_runner, preparing_runner
from services.worker.sampling.held import History
from services.worker.sampling.parameters import Choices
from services.worker.sampling.sampler import Drawn, sample


def record_logits(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The logits of every step from here on, before anything is done to them."""
    record: list[Tensor] = []

    def recording(logits: Tensor, choices: Choices, history: History) -> Drawn:
        record.append(logits.clone())
        return sample(logits, choices, history)

    for runner in (model_runner, launching_runner, preparing_runner):
        monkeypatch.setattr(runner, "sample", recording)
    return record
