"""Reads one layer's Mamba-1 mixer from a checkpoint, or a rank's share of it."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.models.checkpoint import read_exactly
from services.worker.models.config import SelectiveConfig
from services.worker.models.states.mixer_loading import MixerLoader, channel_outputs
from services.worker.models.weights import SelectiveWeights
from services.worker.ops.interface import SelectiveSpace


class SelectiveLoader(MixerLoader[SelectiveConfig]):
    """Of Mamba-1."""

    @property
    def own_outputs(self) -> Tensor:
        """The convolution's inputs, gates."""
        return channel_outputs(self.sizes.heads, self.shard, 2)

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
