"""Mixtures of experts with random weights, and what they give in float64: for kernels here and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.ops.activation import Activation, LimitedActivation
from services.worker.ops.quantized import ExpertBiases
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
    biased: bool = False


def exactly_gated(gate: Tensor, up: Tensor, kind: Activation) -> Tensor:
    """What an MLP makes of float64 gates and ups; swigluoai as transformers' `GptOssExperts` has it."""
    match kind:
        case "silu":
            return F.silu(gate) * up
        case "gelu_tanh":
            return F.gelu(gate, approximate="tanh") * up
        case "swigluoai":
            gate = gate.clamp(max=7.0)
            return (up.clamp(min=-7.0, max=7.0) + 1) * (gate * torch.sigmoid(gate * 1.702))
        case "silu_limited":
            return F.silu(gate.clamp(max=10.0)) * up.clamp(min=-10.0, max=10.0)
        case LimitedActivation("silu_limited", limit):
            return F.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)
        case LimitedActivation("swiglustep", limit):
            return F.silu(gate).clamp(max=limit) * up.clamp(min=-limit, max=limit)
        case "relu2":
            return up.relu().square()
        case _:
            raise ValueError(kind)


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
        self.gate_up = random(shape.experts, (1 if shape.kind == "relu2" else 2) * shape.size, shape.hidden)
        self.down = random(shape.experts, shape.hidden, shape.size)
        self.biases = ExpertBiases(None, None)
        if shape.biased:
            added = (random(shape.experts, 2 * shape.size), random(shape.experts, shape.hidden))
            # Some gates and ups lie beyond the limits of swigluoai.
            self.biases = ExpertBiases(8 * added[0].float(), added[1].float())

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
            both = self.x[row].double() @ self.gate_up[expert].double().T
            if self.biases.gate_up is not None:
                both += self.biases.gate_up[expert].double()
            gate, up = (both, both) if self.shape.kind == "relu2" else both.chunk(2, dim=-1)
            output = exactly_gated(gate, up, self.shape.kind) @ self.down[expert].double().T
            if self.biases.down is not None:
                output += self.biases.down[expert].double()
            total[row] += output * chances[row, place].unsqueeze(1)
        return total

    def check(self, found: Tensor) -> None:
        expected = self.expected()
        assert found.dtype == self.shape.dtype
        most = _EXACT[self.shape.dtype] * max(1.0, float(expected.abs().max()))
        assert float(found.double().sub(expected).abs().max()) < most
