"""Mixtures of experts with random weights, and what they give in float64: for kernels here and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.ops.interface import Activation
from tests.support.kernels.kernel_device import DEVICE

_EXACT = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2.5e-2}
"""Of the largest result: gates, ups and each expert's output are rounded to the dtype, and their sum."""


@dataclass(frozen=True)
class Shape:
    experts: int = 5
    chosen: int = 2
    hidden: int = 24
    size: int = 16
    dtype: torch.dtype = torch.float32
    renormalised: bool = True
    kind: Activation = "silu"


class MixedExperts:
    """Weights, and rows with the router's logits."""

    def __init__(self, shape: Shape, rows: int, seed: int = 0) -> None:
        self.shape = shape
        generator = torch.Generator(DEVICE).manual_seed(seed)

        def random(*sizes: int) -> Tensor:
            made = torch.randn(*sizes, generator=generator, device=DEVICE)
            return (made / sizes[-1] ** 0.5 if len(sizes) == 3 else made).to(shape.dtype)

        self.x = random(rows, shape.hidden)
        self.logits = random(rows, shape.experts)
        self.gate_up = random(shape.experts, 2 * shape.size, shape.hidden)
        self.down = random(shape.experts, shape.hidden, shape.size)

    def routed(self) -> tuple[Tensor, Tensor]:
        """(float64 chances, experts) of each row; of equal chances, the expert with the lower number."""
        chances, experts = self.logits.double().softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        chances, experts = chances[:, : self.shape.chosen], experts[:, : self.shape.chosen]
        return chances / chances.sum(dim=-1, keepdim=True) if self.shape.renormalised else chances, experts

    def expected(self) -> Tensor:
        """In float64, expert by expert."""
        chances, experts = self.routed()
        total = torch.zeros(self.x.shape, dtype=torch.float64, device=self.x.device)
        for expert in range(self.shape.experts):
            row, place = (experts == expert).nonzero(as_tuple=True)
            gate, up = (self.x[row].double() @ self.gate_up[expert].double().T).chunk(2, dim=-1)
            active = F.silu(gate) if self.shape.kind == "silu" else F.gelu(gate, approximate="tanh")
            total[row] += (active * up) @ self.down[expert].double().T * chances[row, place].unsqueeze(1)
        return total

    def check(self, found: Tensor) -> None:
        expected = self.expected()
        assert found.dtype == self.shape.dtype
        most = _EXACT[self.shape.dtype] * max(1.0, float(expected.abs().max()))
        assert float(found.double().sub(expected).abs().max()) < most
