"""Mixtures of experts: routing, and each row's products with its experts."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.model.config import Mixture
from services.worker.ops import Ops
from services.worker.roofline.findings import Work
from services.worker.roofline.kernel_case import Call, Cases, KernelCase, NothingHere, Situation
from services.worker.roofline.traffic import experts_met

_CHOICES = 16
"""Calls whose rows go to other experts each: a cache might hold those of one call."""


def mixture(situation: Situation) -> Cases:
    """Bytes: the experts that rows go to (each row's any, one as likely as another), rows in and out."""
    shape = situation.config.mixture
    if shape is None:
        raise NothingHere(f"{situation.config.architecture} has none")
    gate_up, down = _experts(situation, shape)
    packed = [(ops, ops.pack_experts(gate_up, down)) for ops in situation.implementations]
    for rows in situation.rows:
        x = situation.noise(rows, situation.config.hidden_size)
        choices = [situation.noise(rows, shape.experts) for _ in range(_CHOICES)]

        def made(ops: Ops, experts: object, logits: Tensor, x: Tensor = x) -> Call:
            return lambda: ops.mixture(
                *(x, logits, experts),  # type: ignore[arg-type]
                chosen=shape.chosen,
                renormalised=shape.renormalised,
                kind=situation.config.activation,
            )

        calls = [[made(ops, experts, logits) for logits in choices] for ops, experts in packed]
        yield KernelCase(f"{rows} rows", _work(situation, shape, rows), calls[0], calls[1] if calls[1:] else [])


def _experts(situation: Situation, shape: Mixture) -> tuple[Tensor, Tensor]:
    hidden, size = situation.config.hidden_size, shape.intermediate_size
    gate_up, down = torch.Size((shape.experts, 2 * size, hidden)), torch.Size((shape.experts, hidden, size))
    return situation.noise(*gate_up), situation.noise(*down)


def _work(situation: Situation, shape: Mixture, rows: int) -> Work:
    hidden, item = situation.config.hidden_size, situation.dtype.itemsize
    expert = 3 * hidden * shape.intermediate_size
    moved = item * (experts_met(shape, rows) * expert + rows * (2 * hidden + shape.experts))
    return Work(moved, 2.0 * rows * shape.chosen * expert)
