"""Builds a rank's mixture of experts from a checkpoint, whichever way it lays the experts out.

Checkpoints on the Hub have tensors for each expert, `mlp.experts.0.gate_proj.weight` or Mixtral's
`block_sparse_moe.experts.0.w1.weight`; transformers 5 computes with all experts of a layer in one,
`mlp.experts.gate_up_proj`, and writes them so on request (`save_pretrained(save_original_format=False)`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.model.checkpoint import Tensors
from services.worker.model.config import Mixture

Reader = Callable[[int], Tensor]
"""An expert's number → its part of a stack."""


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
    block, count = f"{layer}.{names.block}", mixture.experts
    reading = _Reading(tensors, f"{block}.experts", names, mixture, hidden, columns)
    together = f"{block}.experts.gate_up_proj" in tensors
    return Experts(
        router=tensors.read(f"{block}.gate.weight", (count, hidden)).to(device),
        gate_up=_stacked(reading.gate_up_of_all if together else reading.gate_up, count, device),
        down=_stacked(reading.down_of_all if together else reading.down, count, device),
    )


class _Reading(NamedTuple):
    tensors: Tensors
    experts: str
    names: _Names
    mixture: Mixture
    hidden: int
    columns: tuple[int, int]

    def gate_up(self, expert: int) -> Tensor:
        shape = (self.mixture.intermediate_size, self.hidden)
        return torch.cat(
            [
                self.tensors.read(f"{self.experts}.{expert}.{part}.weight", shape, rows=self.columns)
                for part in (self.names.gate, self.names.up)
            ]
        )

    def down(self, expert: int) -> Tensor:
        shape = (self.hidden, self.mixture.intermediate_size)
        return self.tensors.read(f"{self.experts}.{expert}.{self.names.down}.weight", shape, columns=self.columns)

    def gate_up_of_all(self, expert: int) -> Tensor:
        size = self.mixture.intermediate_size
        shape = (self.mixture.experts, 2 * size, self.hidden)
        both = self.tensors.read(f"{self.experts}.gate_up_proj", shape, rows=(expert, expert + 1))[0]
        first, end = self.columns
        return torch.cat((both[first:end], both[size + first : size + end]))

    def down_of_all(self, expert: int) -> Tensor:
        shape = (self.mixture.experts, self.hidden, self.mixture.intermediate_size)
        first, end = self.columns
        return self.tensors.read(f"{self.experts}.down_proj", shape, rows=(expert, expert + 1))[0, :, first:end]


def _stacked(read: Reader, count: int, device: torch.device) -> Tensor:
    """One expert at a time, straight to where it stays."""
    first = read(0)
    stack = torch.empty(count, *first.shape, dtype=first.dtype, device=device)
    stack[0].copy_(first)
    for expert in range(1, count):
        stack[expert].copy_(read(expert))
    return stack
