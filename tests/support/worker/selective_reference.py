"""Selective spaces (Mamba-1) as they are written down, in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.ops.interface import SelectiveSpace, StateCache

CHANNELS, KERNEL, SLOTS = 37, 4, 9


def selective_space(dim: int) -> SelectiveSpace:
    torch.manual_seed(5)
    return SelectiveSpace(
        conv_weight=torch.randn(KERNEL, CHANNELS) * 0.5,
        conv_bias=torch.randn(CHANNELS) * 0.1,
        decay=-torch.rand(CHANNELS, dim) * 8,
        skip=torch.randn(CHANNELS),
        step_bias=torch.randn(CHANNELS) - 1,
    )


def empty_states(dim: int) -> StateCache:
    """Which hold what is no number until somebody begins."""
    return StateCache(torch.empty(SLOTS, 0, CHANNELS), torch.full((SLOTS, CHANNELS, 1, dim), torch.nan))


def selective_reference(projected: Tensor, own: SelectiveSpace) -> tuple[Tensor, Tensor]:
    """Outputs of a whole sequence, and its state behind it."""
    decay, skip, bias = (each.double() for each in (own.decay, own.skip, own.step_bias))
    dim = decay.shape[1]
    gates, x, b, c, steps = torch.split(projected.double(), [CHANNELS, CHANNELS, dim, dim, CHANNELS], dim=1)
    steps, state, outputs = F.softplus(steps + bias), torch.zeros(CHANNELS, dim, dtype=torch.float64), []
    for token, step in enumerate(steps):
        state = state * torch.exp(step[:, None] * decay) + (step * x[token])[:, None] * b[token]
        outputs.append(((state * c[token]).sum(1) + skip * x[token]) * F.silu(gates[token]))
    return torch.stack(outputs), state
