"""Masks and draws by kernels where the logits are on a GPU: what `masks` and `sampler` do elsewhere."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.crossing import sent, sent_together
from services.worker.sampling.chances import chances, numbers
from services.worker.sampling.parameters import Choices, Feature
from services.worker.triton_here import why_no_triton


def draws_by_kernel(device: torch.device) -> bool:
    """Whether rows on `device` are masked and drawn here."""
    return device.type == "cuda" and why_no_triton(device) is None


def mask_by_kernel(logits: Tensor, rows: NDArray[np.intp], bits: NDArray[np.int32]) -> None:
    """See `masks.only_allowed`: of `logits`, contiguous, the `rows` [P], each once."""
    from services.worker.kernels.bitmask import apply_bitmask

    apply_bitmask(logits, sent(bits, logits.device), sent(rows.astype(np.int64), logits.device))


def drawn_by_kernel(logits: Tensor, choices: Choices) -> Tensor:
    """[R] int64 tokens: the likeliest of greedy rows, a random one of the others; `logits` stay as they are."""
    from services.worker.kernels.sampling import Draw, draw

    table, slots = choices.table, choices.slots
    greedy = choices.by_row & int(Feature.RANDOM) == 0
    sent_numbers, top_k, temperature, top_p, min_p = sent_together(
        [
            numbers(choices),
            table.top_k[slots],
            np.where(greedy, np.float32(0.0), table.temperature[slots]),
            table.top_p[slots],
            table.min_p[slots],
        ],
        logits.device,
    )
    chance = chances(sent_numbers, choices)
    return draw(logits.contiguous(), Draw(temperature, top_k, top_p, min_p, chance))
