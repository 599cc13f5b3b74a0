"""Reads one layer's gated short convolution from a checkpoint, or a rank's share of it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from services.worker.models.checkpoint import read_exactly
from services.worker.models.config import ConvolutionConfig, ModelConfig
from services.worker.models.quantization.matrices import MatrixLoader, permuted
from services.worker.models.sharding import MixerShard
from services.worker.ops.interface import PackedLinear, ShortConvolution


class ConvolutionLoader(NamedTuple):
    """Of the mixer whose tensors begin with `name`. What makes states is read as exactly as it is stored."""

    matrices: MatrixLoader
    device: torch.device
    config: ModelConfig
    shard: MixerShard
    convolution: ConvolutionConfig
    name: str

    def inputs(self) -> PackedLinear:
        """What a row is projected by: see `StateOps.mix`."""
        convolution, name = self.convolution, f"{self.name}.in_proj"
        matrix = self.matrices.read(name, (convolution.projected, self.config.hidden_size))
        bias = self.matrices.checkpoint.read(f"{name}.bias", (convolution.projected,)) if convolution.bias else None
        if self.shard.num_heads < convolution.heads:
            own = channel_outputs(convolution.heads, self.shard, 3)
            matrix, bias = permuted(matrix, own), None if bias is None else bias[own.to(bias.device)]
        return self.matrices.pack_linear(matrix, bias)

    def output(self) -> PackedLinear:
        """What the mixer's rows are projected back by; rank 0 alone adds the bias."""
        name, hidden, columns = f"{self.name}.out_proj", self.config.hidden_size, self.shard.heads
        adds_bias = self.convolution.bias and columns[0] == 0
        bias = self.matrices.checkpoint.read(f"{name}.bias", (hidden,)) if adds_bias else None
        return self.matrices.pack_inputs(name, (hidden, self.convolution.heads), columns, bias)

    def mixer(self) -> ShortConvolution:
        """All that is between them."""
        convolution, tensors, own = self.convolution, self.matrices.checkpoint, slice(*self.shard.heads)
        name, channels = f"{self.name}.conv", convolution.heads
        weight = read_exactly(tensors, f"{name}.weight", (channels, 1, convolution.kernel))[own]
        bias = read_exactly(tensors, f"{name}.bias", (channels,))[own] if convolution.bias else weight.new_zeros(())
        return ShortConvolution(
            conv_weight=weight.squeeze(1).t().contiguous().to(self.device),
            conv_bias=bias.expand(len(weight)).contiguous().to(self.device),
        )


def channel_outputs(channels: int, shard: MixerShard, parts: int) -> torch.Tensor:
    """Which outputs of `in_proj` a rank has: of each of so many parts, of all `channels`, its own."""
    return torch.cat([part * channels + torch.arange(*shard.heads) for part in range(parts)])
