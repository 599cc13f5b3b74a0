"""The rows between layers: what layers add to them and read of them, and what is kept of them. Knows tensors and `Ops`;
no weights."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from services.worker.distributed.residual_rows import ResidualRows
from services.worker.models.config import ModelConfig
from services.worker.ops.interface import Ops


class ResidualStream:
    """How what a layer gives joins the rows. One for all steps, on one rank's operations."""

    def __init__(self, ops: Ops, config: ModelConfig) -> None:
        self._ops, self._eps, self._scale = ops, config.norm_eps, config.residual_scale

    def read(self, residual: Tensor, norm: Tensor | None) -> Tensor:
        """[n, hidden] → what a layer reads of it: normed, where there is a norm."""
        return residual if norm is None else self._ops.rms_norm(residual, norm, self._eps)

    def scaled(self, x: Tensor) -> Tensor:
        """What attention or an MLP gives → what of it joins the residual; `x` is overwritten."""
        return x if self._scale is None else x.mul_(self._scale)

    def joined(self, x: Tensor, residual: Tensor, norm: Tensor | None) -> tuple[Tensor, Tensor]:
        """What joins the residual, and that → (what the next block reads, normed where it is, the residual). Both may
        be overwritten."""
        if norm is not None:
            return self._ops.add_rms_norm(x, residual, norm, self._eps)
        residual = residual + x
        return residual, residual


class FeatureTaps(NamedTuple):
    """What is kept of the rows between the layers in one step."""

    features: Tensor | None
    """[n, taps * hidden], to be filled; None: nothing is kept."""
    layers: tuple[int, ...]
    """See `Decoder.use_taps`."""
    rows: ResidualRows

    def keep(self, layer: int, residual: Tensor) -> None:
        """What goes into a layer, this rank's rows of it, where it is asked for."""
        if self.features is None or layer not in self.layers:
            return
        residual = self.rows.gathered(residual)
        columns = self.features.view(len(residual), len(self.layers), -1)
        for number in (number for number, tapped in enumerate(self.layers) if tapped == layer):
            columns[:, number].copy_(residual)
