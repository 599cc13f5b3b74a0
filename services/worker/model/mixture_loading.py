"""Builds a rank's mixture of experts from a checkpoint, whichever way it lays the experts out.

Checkpoints on the Hub have tensors for each expert, `mlp.experts.0.gate_proj.weight` or Mixtral's
`block_sparse_moe.experts.0.w1.weight`; transformers 5 computes with all experts of a layer in one,
`mlp.experts.gate_up_proj`, and writes them so on request (`save_pretrained(save_original_format=False)`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.model.checkpoint import Part, ReadsTogether, Tensors
from services.worker.model.config import Mixture


class Experts(NamedTuple):
    """One rank's columns of a layer's experts."""

    router: Tensor
    """[E, hidden]"""
    gate_up: Tensor
    """[E, 2 * I, hidden]: gates, then ups."""
    down: Tensor
    """[E, hidden, I]"""


class _Names(NamedTuple):
    """What a layer's tensors are called."""

    block: str
    gate: str
    up: str
    down: str


_QWEN = _Names("mlp", "gate_proj", "up_proj", "down_proj")
_MIXTRAL = _Names("block_sparse_moe", "w1", "w3", "w2")


def read_experts(
    tensors: Tensors, layer: str, mixture: Mixture, hidden: int, columns: tuple[int, int], device: torch.device
) -> Experts:
    """`columns` of every expert of `layer` ("model.layers.0"), on `device`. Raises ModelError."""
    names = _MIXTRAL if f"{layer}.{_MIXTRAL.block}.gate.weight" in tensors else _QWEN
    block = f"{layer}.{names.block}"
    router = tensors.read(f"{block}.gate.weight", (mixture.experts, hidden)).to(device)
    reading = _Reading(tensors, f"{block}.experts", names, mixture, hidden, columns)
    together = f"{block}.experts.gate_up_proj" in tensors
    gate_up, down = reading.stacks() if together else reading.each()
    return Experts(router, gate_up.to(device), down.to(device))


class _Reading(NamedTuple):
    tensors: Tensors
    experts: str
    names: _Names
    mixture: Mixture
    hidden: int
    columns: tuple[int, int]

    def stacks(self) -> tuple[Tensor, Tensor]:
        """Of tensors that have all experts."""
        count, size, (first, end) = self.mixture.experts, self.mixture.intermediate_size, self.columns
        gates_and_ups = [
            self.tensors.read(f"{self.experts}.gate_up_proj", (count, 2 * size, self.hidden), columns=part)
            for part in ((first, end), (size + first, size + end))
        ]
        down = self.tensors.read(f"{self.experts}.down_proj", (count, self.hidden, size))
        return torch.cat(gates_and_ups, dim=1), down[:, :, first:end].contiguous()

    def each(self) -> tuple[Tensor, Tensor]:
        """Of tensors of an expert each."""
        count, size, own = self.mixture.experts, self.mixture.intermediate_size, self.columns[1] - self.columns[0]
        gates_and_ups, downs = [], []
        for expert in range(count):
            name = f"{self.experts}.{expert}"
            for part in (self.names.gate, self.names.up):
                gates_and_ups.append(Part(f"{name}.{part}.weight", (size, self.hidden), rows=self.columns))
            downs.append(Part(f"{name}.{self.names.down}.weight", (self.hidden, size), columns=self.columns))
        gate_up, down = self._together(gates_and_ups), self._together(downs)
        return gate_up.view(count, 2 * own, self.hidden), down.view(count, self.hidden, own)

    def _together(self, parts: list[Part]) -> Tensor:
        """Flat: one behind the other."""
        if isinstance(self.tensors, ReadsTogether):
            return self.tensors.read_together(parts)
        read = self.tensors.read
        return torch.cat([read(part.name, part.shape, rows=part.rows, columns=part.columns).view(-1) for part in parts])
