"""Rows that are kept before some layers, and join the rows before later ones (Solar Pro's block skip connections)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from services.worker.models.config import LayerConfig, ModelError, SkipConnections


class KeptRows:
    """What one step has kept, by place."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def skipped(self, rows: Tensor, skips: SkipConnections | None) -> Tensor:
        """rows [n, hidden] before a layer → what it reads and adds to. What was kept stays as it is."""
        if skips is None:
            return rows
        for place in skips.kept:
            self._kept[place] = rows.clone()
        for place in skips.joined:
            rows = self._kept[place] * skips.weight + rows * (1 - skips.weight)
        return rows


def check_skips(layers: Sequence[LayerConfig]) -> None:
    """Of a stage's layers. Raises ModelError where one joins what no layer before it in the stage has kept."""
    kept = set[int]()
    for number, layer in enumerate(layers):
        if layer.skips is None:
            continue
        kept |= set(layer.skips.kept)
        if missing := set(layer.skips.joined) - kept:
            raise ModelError(
                f"bskcn: layer {number} of the stage joins rows that none before it keeps (bskcn_{min(missing) + 1}): "
                "choose another --pp or --pp-layers"
            )
