"""The rows between layers: what layers add to them and read of them, and what is kept of them. Knows tensors and `Ops`;
no weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from services.worker.distributed.residual_rows import ResidualRows
from services.worker.models.config import ModelConfig, ResidualScales
from services.worker.models.residual.skips import KeptRows
from services.worker.models.weights import LayerWeights
from services.worker.ops.interface import Ops


class ResidualStream:
    """How what a layer gives joins the rows, on one rank's operations. Where layers have shared blocks it keeps the
    current step's embeddings, which these read, and where rows skip layers these; used by the thread that computes."""

    def __init__(self, ops: Ops, config: ModelConfig) -> None:
        self._ops, self._eps, self._scale = ops, config.norm_eps, config.residual_scale
        self._normed = config.residual_normed
        self._hidden, self._keeps = config.hidden_size, config.shared is not None
        self._streams = 1 if config.connections is None else config.connections.streams
        self._embedded: Tensor | None = None
        self._kept = KeptRows()

    @property
    def width(self) -> int:
        """Elements of a row that goes from stage to stage."""
        return self._hidden * (2 if self._keeps else self._streams)

    def begin(self, rows: Tensor, layer: LayerWeights) -> tuple[Tensor, Tensor]:
        """The rows that a stage begins with, embeddings or what the stage before has `sent` → (what its first layer
        reads, the residual)."""
        if self._keeps:
            sent = rows.shape[1] == self.width
            self._embedded = rows[:, self._hidden :] if sent else rows.clone()
            rows = rows[:, : self._hidden].contiguous() if sent else rows
        self._kept = KeptRows()
        rows = self._kept.skipped(rows, layer.skips)
        rows = rows if layer.entry_norm is None else self._normed_rows(rows, layer.entry_norm)
        x = self._read(rows, layer)
        return x, x if self._normed else rows

    def sent(self, residual: Tensor) -> Tensor:
        """The residual behind a stage's last layer → [n, width] for the next one."""
        return residual if self._embedded is None else torch.cat((residual, self._embedded), dim=1)

    def passed(
        self, x: Tensor, residual: Tensor, layer: LayerWeights, following: LayerWeights
    ) -> tuple[Tensor, Tensor]:
        """What a layer gives, and the residual → (what the `following` one reads, the residual). Both may be
        overwritten."""
        if layer.depth is not None:  # only the following one sees what a shared block gives
            return self._read(residual + x, following), residual
        if following.depth is not None:
            residual = residual + x
            return self._read(residual, following), residual
        if following.skips is not None:
            residual = self._kept.skipped(residual + x, following.skips)
            return self._read(residual, following), residual
        if following.entry_norm is not None:
            residual = self._normed_rows(residual + x, following.entry_norm)
            return self._read(residual, following), residual
        return self.joined(x, residual, following.input_norm)

    def _read(self, residual: Tensor, layer: LayerWeights) -> Tensor:
        """[n, hidden] → what a layer reads of it: normed, where there is a norm."""
        norm, embedded = layer.input_norm, self._embedded
        if layer.depth is not None and embedded is not None:
            residual = torch.cat((residual, embedded), dim=1)
        return residual if norm is None else self._normed_rows(residual, norm)

    def _normed_rows(self, rows: Tensor, norm: Tensor) -> Tensor:
        """Such a norm is [2, hidden] where it is a layer norm."""
        if norm.dim() == 1:
            return self._ops.rms_norm(rows, norm, self._eps)
        weight, bias = norm
        return layer_norm(rows.float(), rows.shape[1:], weight, bias, self._eps).to(rows.dtype)

    def scaled(self, x: Tensor, scales: ResidualScales | None) -> Tensor:
        """What attention or an MLP gives → what of it joins the residual; `x` is overwritten."""
        if scales is not None and scales.added != 1.0:
            x = x.mul_(scales.added)
        return x if self._scale is None else x.mul_(self._scale)

    def kept(self, residual: Tensor, scales: ResidualScales | None) -> Tensor:
        """As much of the residual as something joins. Not in place: a normed one is what is read, too."""
        return residual if scales is None or scales.kept == 1.0 else residual * scales.kept

    def joined(self, x: Tensor, residual: Tensor, norm: Tensor | None) -> tuple[Tensor, Tensor]:
        """What joins the residual, and that → (what the next block reads, normed where it is, the residual). Both may
        be overwritten."""
        if norm is None:
            residual = residual + x
            return residual, residual
        if norm.dim() > 1:
            residual = residual + x
            return self._normed_rows(residual, norm), residual
        x, residual = self._ops.add_rms_norm(x, residual, norm, self._eps)
        return x, x if self._normed else residual


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
