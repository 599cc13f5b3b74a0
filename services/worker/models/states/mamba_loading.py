"""Reads one layer's Mamba-2 mixer from a checkpoint, or a rank's share of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.models.checkpoint import read_exactly
from services.worker.models.config import MambaConfig, ModelConfig
from services.worker.models.quantization.matrices import MatrixLoader, permuted
from services.worker.models.sharding import MixerShard
from services.worker.ops.interface import PackedLinear, StateSpace


class MambaLoader(NamedTuple):
    """Of the mixer whose tensors begin with `name`. What makes states is read as exactly as it is stored."""

    matrices: MatrixLoader
    device: torch.device
    config: ModelConfig
    shard: MixerShard
    mamba: MambaConfig
    name: str

    def inputs(self) -> PackedLinear:
        """What a row is projected by: see `StateOps.mix`."""
        mamba, name = self.mamba, f"{self.name}.in_proj"
        matrix = self.matrices.read(name, (mamba.projected, self.config.hidden_size))
        bias = self.matrices.checkpoint.read(f"{name}.bias", (mamba.projected,)) if mamba.bias else None
        if self.shard.num_heads < mamba.heads:
            own = own_outputs(self.mamba, self.shard)
            matrix, bias = permuted(matrix, own), None if bias is None else bias[own.to(bias.device)]
        return self.matrices.pack_linear(matrix, bias)

    def output(self) -> PackedLinear:
        """What the mixer's rows are projected back by; rank 0 alone adds the bias."""
        name, columns = f"{self.name}.out_proj", self.shard.elements(self.mamba.head_dim)
        adds_bias = self.mamba.bias and columns[0] == 0
        bias = self.matrices.checkpoint.read(f"{name}.bias", (self.config.hidden_size,)) if adds_bias else None
        return self.matrices.pack_inputs(name, (self.config.hidden_size, self.mamba.inner), columns, bias)

    def mixer(self) -> StateSpace:
        """All that is between them."""
        mamba, shard = self.mamba, self.shard
        conv = self._read("conv1d.weight", (mamba.conv_dim, 1, mamba.kernel))
        bias = self._read("conv1d.bias", (mamba.conv_dim,)) if mamba.conv_bias else conv.new_zeros(mamba.conv_dim)
        channels, heads = _own_channels(mamba, shard).to(conv.device), slice(*shard.heads)
        return StateSpace(
            heads=shard.num_heads,
            head_dim=mamba.head_dim,
            groups=shard.num_groups,
            state_dim=mamba.state_dim,
            conv_weight=conv[channels].squeeze(1).t().contiguous(),
            conv_bias=bias[channels],
            decay=self._read("A_log", (mamba.heads,))[heads].exp().neg(),
            skip=self._read("D", (mamba.heads,))[heads].contiguous(),
            step_bias=self._read("dt_bias", (mamba.heads,))[heads].contiguous(),
            norm=self._norm() if mamba.normed and shard.norm_parts == 1 else None,
            eps=self.config.norm_eps,
        )

    def split_norm(self) -> Tensor | None:
        """This rank's part of the norm's weight, where the norm goes over several ranks."""
        return self._norm() if self.mamba.normed and self.shard.norm_parts > 1 else None

    def _norm(self) -> Tensor:
        whole = self._read("norm.weight", (self.mamba.inner,))
        return whole[slice(*self.shard.elements(self.mamba.head_dim))].contiguous()

    def _read(self, part: str, shape: tuple[int, ...]) -> Tensor:
        return read_exactly(self.matrices.checkpoint, f"{self.name}.{part}", shape).to(self.device)


def own_outputs(mamba: MambaConfig, shard: MixerShard) -> Tensor:
    """Which outputs of `in_proj` a rank has: gates, the convolution's channels, time steps."""
    steps = mamba.inner + mamba.conv_dim
    gates = torch.arange(*shard.elements(mamba.head_dim))
    return torch.cat((gates, mamba.inner + _own_channels(mamba, shard), steps + torch.arange(*shard.heads)))


def _own_channels(mamba: MambaConfig, shard: MixerShard) -> Tensor:
    """Of the convolution: heads' inputs, then each group's B and C."""
    dim = mamba.state_dim
    first, end = (group * dim for group in shard.groups)
    b, c = mamba.inner, mamba.inner + mamba.groups * dim
    parts = (shard.elements(mamba.head_dim), (b + first, b + end), (c + first, c + end))
    return torch.cat([torch.arange(*part) for part in parts])
