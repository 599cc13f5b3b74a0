"""Reads one layer's Mamba-2 mixer from a checkpoint, or a rank's share of it."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.models.checkpoint import read_exactly
from services.worker.models.config import MambaConfig
from services.worker.models.sharding import MixerShard
from services.worker.models.states.mixer_loading import MixerLoader
from services.worker.ops.interface import StateSpace


class MambaLoader(MixerLoader[MambaConfig]):
    """Of Mamba-2."""

    @property
    def own_outputs(self) -> Tensor:
        """Gates, the convolution's channels, time steps."""
        return own_outputs(self.sizes, self.shard)

    def mixer(self) -> StateSpace:
        """All that is between them."""
        mamba, shard = self.sizes, self.shard
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
        return self._norm() if self.sizes.normed and self.shard.norm_parts > 1 else None

    def _norm(self) -> Tensor:
        whole = self._read("norm.weight", (self.sizes.inner,))
        return whole[slice(*self.shard.elements(self.sizes.head_dim))].contiguous()

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
