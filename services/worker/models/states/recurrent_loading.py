"""Reads one layer's recurrent unit from a checkpoint, or a rank's share of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.models.checkpoint import read_exactly
from services.worker.models.config import ModelConfig, RecurrentConfig
from services.worker.models.hf_layers.tensor_names import tensor_names
from services.worker.models.quantization.matrices import MatrixLoader
from services.worker.models.sharding import MixerShard
from services.worker.models.weights import RecurrentWeights
from services.worker.ops.interface import PackedLinear, RecurrentUnit

INPUTS = ("linear_y", "linear_x")
"""The modules that a row goes through: what gates outputs, and what the convolution sees."""
_RATE = -8.0
"""What a rate is multiplied with; all checkpoints are trained with this one."""


class RecurrentLoader(NamedTuple):
    """Of the mixer whose tensors begin with `name`. What makes states is read as exactly as it is stored."""

    matrices: MatrixLoader
    device: torch.device
    config: ModelConfig
    shard: MixerShard
    sizes: RecurrentConfig
    name: str

    def inputs(self) -> PackedLinear:
        """What a row is projected by, in the order of `INPUTS`."""
        channels, shape = self.sizes.heads, (self.sizes.heads, self.config.hidden_size)
        read = [self.matrices.read(f"{self.name}.{part}", shape, rows=self.shard.heads) for part in INPUTS]
        biases = [
            self.matrices.checkpoint.read(f"{self.name}.{part}.bias", (channels,), rows=self.shard.heads)
            for part in INPUTS
        ]
        return self.matrices.pack_linear(self.matrices.join(read), torch.cat(biases))

    def output(self) -> PackedLinear:
        """What the mixer's rows are projected back by; rank 0 alone adds the bias."""
        name, hidden = f"{self.name}.{tensor_names(self.config.architecture).mixer_output}", self.config.hidden_size
        first = self.shard.heads[0] == 0
        bias = self.matrices.checkpoint.read(f"{name}.bias", (hidden,)) if first else None
        return self.matrices.pack_inputs(name, (hidden, self.sizes.heads), self.shard.heads, bias)

    def mixer(self) -> RecurrentUnit:
        """All that is between them."""
        sizes, own = self.sizes, slice(*self.shard.heads)
        conv = self._read("conv_1d.weight", (sizes.heads, 1, sizes.kernel))[own]
        return RecurrentUnit(
            conv_weight=conv.squeeze(1).t().contiguous().to(self.device),
            conv_bias=self._read("conv_1d.bias", (sizes.heads,))[own].contiguous().to(self.device),
            decay=(F.softplus(self._read("rg_lru.recurrent_param", (sizes.heads,))[own]) * _RATE).to(self.device),
        )

    def between(self) -> RecurrentWeights:
        """The products between these. Few weights that decide on states: as in the checkpoint, never rounded."""
        block, (first, end) = self.sizes.block, (each // self.sizes.block for each in self.shard.heads)
        count, read = self.sizes.heads // block, self.matrices.checkpoint.read
        gates = [f"{self.name}.rg_lru.{gate}_gate" for gate in ("input", "recurrent")]
        weights = [read(f"{gate}_weight", (count, block, block), rows=(first, end)) for gate in gates]
        biases = torch.cat([read(f"{gate}_bias", (count, block), rows=(first, end)) for gate in gates], dim=1)
        matrices = torch.cat(weights, dim=2).transpose(1, 2).contiguous()
        return RecurrentWeights(tuple(self.matrices.pack(*each) for each in zip(matrices, biases, strict=True)))

    def _read(self, part: str, shape: tuple[int, ...]) -> Tensor:
        return read_exactly(self.matrices.checkpoint, f"{self.name}.{part}", shape)
