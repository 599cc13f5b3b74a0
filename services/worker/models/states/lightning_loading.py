"""Reads one layer's lightning attention from a checkpoint, or a rank's share of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.models.checkpoint import read_exactly
from services.worker.models.config import LightningConfig, ModelConfig
from services.worker.models.quantization.matrices import MatrixLoader, permuted
from services.worker.models.sharding import MixerShard
from services.worker.ops.interface import PackedLinear, StateSpace

_LAST = 1e-5
"""What the last layer still forgets, as a part of what the first one does."""


class LightningLoader(NamedTuple):
    """Of the attention whose tensors begin with `name`. What makes states is read as exactly as it is stored."""

    matrices: MatrixLoader
    device: torch.device
    config: ModelConfig
    shard: MixerShard
    sizes: LightningConfig
    name: str

    def inputs(self) -> PackedLinear:
        """What a row is projected by: values, keys and queries."""
        matrix = self.matrices.read(f"{self.name}.qkv_proj", (self.sizes.projected, self.config.hidden_size))
        return self.matrices.pack_linear(permuted(matrix, own_outputs(self.sizes, self.shard)), None)

    def gate(self) -> PackedLinear:
        """What its gates are made by."""
        shape = (self.sizes.inner, self.config.hidden_size)
        return self.matrices.pack_linear(self.matrices.read(f"{self.name}.output_gate", shape, rows=self._own), None)

    def output(self) -> PackedLinear:
        """What the mixer's rows are projected back by."""
        shape = (self.config.hidden_size, self.sizes.inner)
        return self.matrices.pack_inputs(f"{self.name}.out_proj", shape, self._own, None)

    def norm(self) -> Tensor:
        """This rank's part of the norm over all heads."""
        whole = read_exactly(self.matrices.checkpoint, f"{self.name}.norm.weight", (self.sizes.inner,))
        return whole[slice(*self._own)].contiguous().to(self.device)

    def mixer(self, layer: int) -> StateSpace:
        """Of the model's layer of this number: a state space without a convolution, whose time steps are 1."""
        heads, dim = self.shard.num_heads, self.sizes.head_dim
        conv_weight = torch.ones(1, 3 * heads * dim, device=self.device)
        nothing = torch.zeros(heads, device=self.device)
        return StateSpace(
            *(heads, dim, heads, dim),
            conv_weight=conv_weight,
            conv_bias=torch.zeros_like(conv_weight[0]),
            decay=self._slopes(layer)[slice(*self.shard.heads)].neg().to(self.device),
            skip=nothing,
            step_bias=nothing,
            norm=None,
            eps=self.sizes.norm_eps,
            lightning=True,
        )

    def _slopes(self, layer: int) -> Tensor:
        """[H] how fast heads forget: geometric as ALiBi's (Press et al., arXiv:2108.12409), and slower layer by
        layer."""
        base = torch.tensor(2.0 ** (-8.0 / self.sizes.heads))
        slopes = base.pow(torch.arange(self.sizes.heads) + 1)
        return slopes * (1 - layer / (self.config.num_layers - 1 + _LAST) + _LAST)

    @property
    def _own(self) -> tuple[int, int]:
        return self.shard.elements(self.sizes.head_dim)


def own_outputs(sizes: LightningConfig, shard: MixerShard) -> Tensor:
    """Which outputs of `qkv_proj`, where each head has a query, a key and a value, a rank has, in the order of
    `StateOps.mix`."""
    own = torch.arange(sizes.projected).view(sizes.heads, 3, sizes.head_dim)[slice(*shard.heads)]
    return own.flip(1).transpose(0, 1).flatten()
