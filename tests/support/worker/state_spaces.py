"""State spaces of tests that several of them try."""

from __future__ import annotations

import torch

from services.worker.ops.interface import StateSpace


def lightning(heads: int, dim: int) -> StateSpace:
    """Lightning attention, whose heads forget from nearly everything to nearly nothing."""
    nothing = torch.zeros(heads)
    return StateSpace(
        *(heads, dim, heads, dim),
        conv_weight=torch.ones(1, 3 * heads * dim),
        conv_bias=torch.zeros(3 * heads * dim),
        decay=-torch.logspace(0.5, -4, heads),
        skip=nothing,
        step_bias=nothing,
        norm=None,
        eps=1e-6,
        lightning=True,
    )
