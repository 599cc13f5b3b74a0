"""Reads one layer's Mamba-2 mixer from a checkpoint."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.models.checkpoint import read_exactly
from services.worker.models.config import MambaConfig, ModelConfig
from services.worker.models.quantization.matrices import MatrixLoader
from services.worker.ops.interface import PackedLinear, StateSpace


class MambaLoader(NamedTuple):
    """Of the mixer whose tensors begin with `name`. What makes states is read as exactly as it is stored."""

    matrices: MatrixLoader
    device: torch.device
    config: ModelConfig
    mamba: MambaConfig
    name: str

    def inputs(self) -> PackedLinear:
        """What a row is projected by: see `StateOps.mix`."""
        return self._projection("in_proj", self.config.hidden_size, self.mamba.projected)

    def output(self) -> PackedLinear:
        """What the mixer's rows are projected back by."""
        return self._projection("out_proj", self.mamba.inner, self.config.hidden_size)

    def mixer(self) -> StateSpace:
        """All that is between them."""
        mamba = self.mamba
        conv = self._read("conv1d.weight", (mamba.conv_dim, 1, mamba.kernel))
        bias = self._read("conv1d.bias", (mamba.conv_dim,)) if mamba.conv_bias else conv.new_zeros(mamba.conv_dim)
        return StateSpace(
            heads=mamba.heads,
            head_dim=mamba.head_dim,
            groups=mamba.groups,
            state_dim=mamba.state_dim,
            conv_weight=conv.squeeze(1).t().contiguous(),
            conv_bias=bias,
            decay=self._read("A_log", (mamba.heads,)).exp().neg(),
            skip=self._read("D", (mamba.heads,)),
            step_bias=self._read("dt_bias", (mamba.heads,)),
            norm=self._read("norm.weight", (mamba.inner,)),
            eps=self.config.norm_eps,
        )

    def _projection(self, part: str, inputs: int, outputs: int) -> PackedLinear:
        name = f"{self.name}.{part}"
        bias = self.matrices.checkpoint.read(f"{name}.bias", (outputs,)) if self.mamba.bias else None
        return self.matrices.pack_linear(self.matrices.read(name, (outputs, inputs)), bias)

    def _read(self, part: str, shape: tuple[int, ...]) -> Tensor:
        return read_exactly(self.matrices.checkpoint, f"{self.name}.{part}", shape).to(self.device)
