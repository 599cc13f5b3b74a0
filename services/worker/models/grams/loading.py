"""Reads what gates several streams, and what layers add of n-grams to them, from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.models.checkpoint import read_exactly
from services.worker.models.config import GramConfig, HyperConnections, ModelConfig
from services.worker.models.grams.adding import dilated, keeps_tokens
from services.worker.models.grams.hashes import multipliers, table_sizes
from services.worker.models.layer_parts.streams import GatedMixing, GramWeights
from services.worker.models.quantization.matrices import MatrixLoader
from services.worker.ops.interface import PackedLinear


class GatedStreamsLoader(NamedTuple):
    """By the names that `transformers` has. Nothing is rounded beyond what the checkpoint is."""

    matrices: MatrixLoader
    device: torch.device
    config: ModelConfig
    connections: HyperConnections
    norm: Callable[[str, int], Tensor]
    """Reads the weight of one."""

    @property
    def _width(self) -> int:
        return self.connections.streams * self.config.hidden_size

    def of_layer(self, layer: str) -> tuple[GatedMixing, GatedMixing]:
        """Those around attention, and those around the MLP, of the layer whose tensors begin with `layer`."""
        attention, mlp = (self._mixing(f"{layer}.{each}_hyper_connection", blocks=True) for each in ("attn", "mlp"))
        return attention, mlp

    def last(self) -> GatedMixing:
        """Those behind the last layer."""
        return self._mixing("model.hyper_connection_mixer", blocks=False)

    def _mixing(self, name: str, *, blocks: bool) -> GatedMixing:
        width, rank, streams = self._width, self.connections.rank, self.connections.streams
        return GatedMixing(
            norm=self.norm(f"{name}.hc_norm.weight", width),
            down=self._matrix(f"{name}.input_mix_weight_down", (rank, width)),
            up=self._matrix(f"{name}.input_mix_weight_up", (width, rank)),
            added=self._matrix(f"{name}.block_inject_weight", (streams, width)) if blocks else None,
        )

    def grams(self, number: int | None, layer: str) -> GramWeights | None:
        """Of the layer whose tensors begin with `layer`, the one of this number that has n-grams; None: it has none."""
        grams = self.config.grams
        if grams is None or number is None:
            return None
        name, width = f"{layer}.ple", self._width
        sizes, offsets, rows = table_sizes(grams, number)
        weight = read_exactly(self.matrices.checkpoint, f"{name}.conv1d.weight", (width, 1, grams.kernel))
        return GramWeights(
            multipliers=multipliers(grams, self.config.vocab_size, number).to(self.device),
            sizes=sizes.to(self.device),
            offsets=offsets.to(self.device),
            table=self._table(grams, f"{name}.ple_embedding.ngram_embedding", rows),
            keys=self._matrix(f"{name}.key_proj", (width, grams.dim)),
            values=self._matrix(f"{name}.value_proj", (self.config.hidden_size, grams.dim)),
            key_norm=self.norm(f"{name}.norm_key.weight", width),
            query_norm=self.norm(f"{name}.norm_query.weight", width),
            value_norm=self.norm(f"{name}.norm_conv.weight", width),
            convolution=dilated(weight.squeeze(1).to(self.device), grams),
            tokens=keeps_tokens(grams, self.device),
        )

    def _table(self, grams: GramConfig, name: str, rows: int) -> Tensor:
        """One tensor, or as many as there are shards, one behind the other."""
        source, width = self.matrices.checkpoint, grams.dim // grams.hashes
        if f"{name}.shard_0.weight" not in source:
            return source.read(f"{name}.weight", (rows, width)).to(self.device)
        sizes = [len(part) for part in torch.empty(rows, 0).chunk(grams.shards)]
        first = source.read(f"{name}.shard_0.weight", (sizes[0], width))
        # Filled part by part: joined, one of a hundred gigabytes would be there twice.
        table = torch.empty(rows, width, dtype=first.dtype, device=self.device)
        for number, (part, size) in enumerate(zip(torch.split(table, sizes), sizes, strict=True)):
            part.copy_(source.read(f"{name}.shard_{number}.weight", (size, width)) if number else first)
        return table

    def _matrix(self, name: str, shape: tuple[int, int]) -> PackedLinear:
        return self.matrices.pack(self.matrices.numbers(self.matrices.read(name, shape)), None)
