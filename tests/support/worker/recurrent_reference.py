"""Recurrent units (RG-LRU) as they are written down, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.ops.interface import RecurrentUnit

CHANNELS, KERNEL = 37, 4


def recurrent_unit() -> RecurrentUnit:
    torch.manual_seed(5)
    return RecurrentUnit(torch.randn(KERNEL, CHANNELS) * 0.5, torch.randn(CHANNELS) * 0.1, -torch.rand(CHANNELS) * 8)


def recurrent_reference(projected: Tensor, own: RecurrentUnit) -> tuple[Tensor, Tensor]:
    """Outputs of a whole sequence, and its state behind it, [C, 1, 1]."""
    taken, forgotten, x = projected.double().chunk(3, dim=1)
    left = torch.exp(forgotten.sigmoid() * own.decay.double())
    state, outputs = torch.zeros(CHANNELS, dtype=torch.float64), []
    for token in range(len(projected)):
        share = (1 - left[token] ** 2).sqrt() if token else 1.0
        state = left[token] * state + share * taken[token].sigmoid() * x[token]
        outputs.append(state)
    return torch.stack(outputs), state[:, None, None]
