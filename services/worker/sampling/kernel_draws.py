"""Draws by kernels where the logits are on a GPU: the tokens that `sampler` draws elsewhere, in two launches."""

from __future__ import annotations

import importlib.util
from functools import cache

import numpy as np
import torch
from torch import Tensor

from services.worker.crossing import sent_together
from services.worker.sampling.parameters import Choices, Feature
from services.worker.sampling.philox import uniforms


def draws_by_kernel(device: torch.device) -> bool:
    """Whether rows on `device` are drawn here."""
    return device.type == "cuda" and _has_triton()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def drawn_by_kernel(logits: Tensor, choices: Choices) -> Tensor:
    """[R] int64 tokens: the likeliest of greedy rows, a random one of the others; `logits` stay as they are."""
    from services.worker.kernels.sampling import Draw, draw

    table, slots = choices.table, choices.slots
    greedy = choices.by_row & int(Feature.RANDOM) == 0
    chance, top_k, temperature, top_p, min_p = sent_together(
        [
            uniforms(table.seed[slots], choices.position),
            table.top_k[slots],
            np.where(greedy, np.float32(0.0), table.temperature[slots]),
            table.top_p[slots],
            table.min_p[slots],
        ],
        logits.device,
    )
    return draw(logits.contiguous(), Draw(temperature, top_k, top_p, min_p, chance))
