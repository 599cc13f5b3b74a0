"""Reads one layer's Mamba-1 mixer from a checkpoint, or a rank's share of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.models.checkpoint import read_exactly
from services.worker.models.config import ModelConfig, SelectiveConfig
from services.worker.models.quantization.matrices import MatrixLoader, permuted
from services.worker.models.sharding import MixerShard
from services.worker.models.states.convolution_loading import channel_outputs
from services.worker.models.weights import SelectiveWeights
from services.worker.ops.interface import PackedLinear, SelectiveSpace


class SelectiveLoader(NamedTuple):
    """Of the mixer whose tensors begin with `name`. What makes states is read as exactly as it is stored."""

    matrices: MatrixLoader
    device: torch.device
    config: ModelConfig
    shard: MixerShard
    sizes: SelectiveConfig
    name: str

    def inputs(self) -> PackedLinear:
        """What a row is projected by: to the convolution's inputs, then to gates."""
        sizes, name = self.sizes, f"{self.name}.in_proj"
        matrix = self.matrices.read(name, (sizes.projected, self.config.hidden_size))
        bias = self.matrices.checkpoint.read(f"{name}.bias", (sizes.projected,)) if sizes.bias else None
        if self.shard.num_heads < sizes.heads:
            own = channel_outputs(sizes.heads, self.shard, 2)
            matrix, bias = permuted(matrix, own), None if bias is None else bias[own.to(bias.device)]
        return self.matrices.pack_linear(matrix, bias)

    def output(self) -> PackedLinear:
        """What the mixer's rows are projected back by; rank 0 alone adds the bias."""
        name, hidden, columns = f"{self.name}.out_proj", self.config.hidden_size, self.shard.heads
        adds_bias = self.sizes.bias and columns[0] == 0
        bias = self.matrices.checkpoint.read(f"{name}.bias", (hidden,)) if adds_bias else None
        return self.matrices.pack_inputs(name, (hidden, self.sizes.heads), columns, bias)

    def mixer(self) -> SelectiveSpace:
        """The rules between them."""
        sizes, channels = self.sizes, self.sizes.heads
        conv = self._read("conv1d.weight", (channels, 1, sizes.kernel)).squeeze(1).t().contiguous()
        bias = self._read("conv1d.bias", (channels,)) if sizes.conv_bias else conv.new_zeros(conv.shape[1])
        return SelectiveSpace(
            conv_weight=conv,
            conv_bias=bias,
            decay=self._read("A_log", (channels, sizes.state_dim)).exp().neg(),
            skip=self._read("D", (channels,)),
            step_bias=self._read("dt_proj.bias", (channels,)),
        )

    def between(self) -> SelectiveWeights:
        """The products between these. Few weights that decide on states: as in the checkpoint, never rounded."""
        sizes, (first, end) = self.sizes, self.shard.heads
        made = self.matrices.read(f"{self.name}.x_proj", (sizes.made, sizes.heads), columns=(first, end))
        steps = self.matrices.read(f"{self.name}.dt_proj", (sizes.heads, sizes.step_rank), rows=(first, end))
        return SelectiveWeights(
            made=self.matrices.pack(made, None),
            steps=self.matrices.pack(steps, None),
            sizes=(sizes.step_rank, sizes.state_dim, sizes.state_dim),
            norms=self._norms(),
            eps=sizes.norm_eps or 0.0,
        )

    def _norms(self) -> tuple[Tensor, Tensor, Tensor] | None:
        sizes, dim = self.sizes, self.sizes.state_dim
        if sizes.norm_eps is None:
            return None
        if not sizes.norm_weights:
            steps, b, c = (torch.ones(size, device=self.device) for size in (sizes.step_rank, dim, dim))
            return steps, b, c
        return (
            self._whole("dt_layernorm.weight", sizes.step_rank),
            self._whole("b_layernorm.weight", dim),
            self._whole("c_layernorm.weight", dim),
        )

    def _whole(self, part: str, size: int) -> Tensor:
        return read_exactly(self.matrices.checkpoint, f"{self.name}.{part}", (size,)).to(self.device)

    def _read(self, part: str, shape: tuple[int, ...]) -> Tensor:
        """This rank's channels."""
        whole = read_exactly(self.matrices.checkpoint, f"{self.name}.{part}", shape)
        return whole[slice(*self.shard.heads)].contiguous().to(self.device)
