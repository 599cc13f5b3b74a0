"""Reads from a checkpoint what mixers with states have alike: the projections into them and out of them."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from services.worker.models.config import ConvolutionConfig, MambaConfig, ModelConfig, SelectiveConfig
from services.worker.models.quantization.matrices import MatrixLoader, permuted
from services.worker.models.sharding import MixerShard
from services.worker.ops.interface import PackedLinear

Sizes = TypeVar("Sizes", bound=MambaConfig | SelectiveConfig | ConvolutionConfig)


class MixerLoader(NamedTuple, Generic[Sizes]):
    """Of the mixer whose tensors begin with `name`, or of a rank's share of it. What a kind of mixer has between the
    projections is read by that kind's loader, as exactly as it is stored where it makes states."""

    matrices: MatrixLoader
    device: torch.device
    config: ModelConfig
    shard: MixerShard
    sizes: Sizes
    name: str

    @property
    def own_outputs(self) -> Tensor:
        """Which outputs of `in_proj` the rank has, in their order."""
        raise NotImplementedError

    def inputs(self) -> PackedLinear:
        """What a row is projected by: see `StateOps.mix`."""
        sizes, name = self.sizes, f"{self.name}.in_proj"
        matrix = self.matrices.read(name, (sizes.projected, self.config.hidden_size))
        bias = self.matrices.checkpoint.read(f"{name}.bias", (sizes.projected,)) if sizes.bias else None
        if self.shard.num_heads < sizes.heads:
            own = self.own_outputs
            matrix, bias = permuted(matrix, own), None if bias is None else bias[own.to(bias.device)]
        return self.matrices.pack_linear(matrix, bias)

    def output(self) -> PackedLinear:
        """What the mixer's rows are projected back by; rank 0 alone adds the bias."""
        name, columns = f"{self.name}.out_proj", self.shard.elements(self.sizes.head_dim)
        adds_bias = self.sizes.bias and columns[0] == 0
        bias = self.matrices.checkpoint.read(f"{name}.bias", (self.config.hidden_size,)) if adds_bias else None
        return self.matrices.pack_inputs(name, (self.config.hidden_size, self.sizes.inner), columns, bias)


def channel_outputs(channels: int, shard: MixerShard, parts: int) -> Tensor:
    """Which outputs of `in_proj` a rank has: of each of so many parts, of all `channels`, its own."""
    return torch.cat([part * channels + torch.arange(*shard.heads) for part in range(parts)])
