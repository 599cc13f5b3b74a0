"""Reads what a layer with compressed keys, and with several residual streams, has in a checkpoint, for some heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.models.checkpoint import read_exactly
from services.worker.models.config import CompressedConfig, Compression, HyperConnections, ModelConfig
from services.worker.models.layer_parts.streams import StreamMixing
from services.worker.models.quantization.matrices import MatrixLoader
from services.worker.models.sharding import LayerShard
from services.worker.models.weights import (
    CompressedWeights,
    CompressorWeights,
    EntryWeights,
    LayerMixer,
)
from services.worker.ops.interface import Ops, PackedHeads, PackedLinear


class CompressedLoader(NamedTuple):
    """By the names that `transformers` has. What makes entries, and what chooses them, is never rounded beyond what the
    checkpoint is, nor are the matrices of groups, which stand behind attention head by head."""

    matrices: MatrixLoader
    ops: Ops
    device: torch.device
    config: ModelConfig
    sizes: CompressedConfig
    share: LayerShard

    @property
    def _groups(self) -> tuple[int, int]:
        """Of this rank."""
        heads = self.config.num_heads // self.sizes.groups
        return self.share.heads[0] // heads, self.share.heads[1] // heads

    def mixer(self, name: str, kind: Compression | None, cos_sin: Tensor) -> LayerMixer:
        """Whose tensors begin with `name`. Raises ModelError."""
        sizes, hidden, dim, heads = self.sizes, self.config.hidden_size, self.config.head_dim, self.share.heads
        made = [
            self.matrices.read(f"{name}.{part}", (size, hidden))
            for part, size in (("q_a_proj", sizes.q_rank), ("kv_proj", dim))
        ]
        queries = self.matrices.read(
            f"{name}.q_b_proj", (self.config.num_heads * dim, sizes.q_rank), rows=(heads[0] * dim, heads[1] * dim)
        )
        first, last = (group * sizes.output_rank for group in self._groups)
        sinks = read_exactly(self.matrices.checkpoint, f"{name}.sinks", (self.config.num_heads,))
        return LayerMixer(
            inputs=self.matrices.pack_linear(self.matrices.join(made), None),
            output=self.matrices.pack_inputs(
                f"{name}.o_b_proj", (hidden, sizes.groups * sizes.output_rank), (first, last), None
            ),
            cos_sin=cos_sin,
            sinks=sinks[slice(*heads)].to(self.device),
            compressed=CompressedWeights(
                q_norm=self._norm(f"{name}.q_a_norm", sizes.q_rank),
                q_up=self.matrices.pack_linear(queries, None),
                key_norm=self._norm(f"{name}.kv_norm", dim),
                grouped=self._grouped(f"{name}.o_a_proj"),
                entries=None if kind is None else self._entries(f"{name}.compressor", kind),
            ),
        )

    def _grouped(self, name: str) -> PackedHeads:
        groups, rank, (first, last) = self.sizes.groups, self.sizes.output_rank, self._groups
        inputs = self.config.num_heads * self.config.head_dim // groups
        read = self.matrices.read(name, (groups * rank, inputs), rows=(first * rank, last * rank))
        by_group = self.matrices.numbers(read).view(last - first, rank, inputs)
        return self.ops.latents.pack_heads(by_group.contiguous().to(self.device))

    def _entries(self, name: str, kind: Compression) -> EntryWeights:
        sizes, dim = self.sizes, self.config.head_dim
        if not kind.sparse:
            inputs = self._unrounded([(f"{name}.{part}", dim) for part in ("kv_proj", "gate_proj")])
            return EntryWeights(inputs, self._compressor(name, kind, dim, dim), None, None)
        index = f"{name}.indexer"
        parts = [(f"{each}.{part}", 2 * width) for each, width in ((name, dim), (index, sizes.index_dim))
                 for part in ("kv_proj", "gate_proj")]  # fmt: skip
        queries = self.matrices.read(f"{index}.q_b_proj", (sizes.index_heads * sizes.index_dim, sizes.q_rank))
        return EntryWeights(
            inputs=self._unrounded([*parts, (f"{index}.scorer.weights_proj", sizes.index_heads)]),
            keys=self._compressor(name, kind, 2 * dim, dim),
            index=self._compressor(index, kind, 2 * sizes.index_dim, sizes.index_dim),
            index_q_up=self.matrices.pack(queries, None),
        )

    def _unrounded(self, parts: list[tuple[str, int]]) -> PackedLinear:
        """One matrix of several modules, with so many outputs each."""
        read = [
            self.matrices.numbers(self.matrices.read(name, (size, self.config.hidden_size))) for name, size in parts
        ]
        return self.matrices.pack(self.matrices.join([*read]), None)

    def _compressor(self, name: str, kind: Compression, width: int, dim: int) -> CompressorWeights:
        bias = read_exactly(self.matrices.checkpoint, f"{name}.position_bias", (kind.rate, width))
        return CompressorWeights(bias.to(self.device), self._norm(f"{name}.kv_norm", dim))

    def _norm(self, name: str, size: int) -> Tensor:
        return read_exactly(self.matrices.checkpoint, f"{name}.weight", (size,)).to(self.device)


class StreamsLoader(NamedTuple):
    """Of a model with several streams, by the names that `transformers` has."""

    matrices: MatrixLoader
    ops: Ops
    device: torch.device
    hidden: int
    connections: HyperConnections

    def of_layer(self, layer: str) -> tuple[StreamMixing, StreamMixing]:
        """Those around attention, and those around the MLP, of the layer whose tensors begin with `layer`."""
        outputs, scales = self.connections.outputs, 3 if self.connections.mixes else 2
        attention, mlp = (self._mixing(f"{layer}.{each}_hc.", outputs, scales) for each in ("attn", "ffn"))
        return attention, mlp

    def last(self) -> StreamMixing | None:
        """Those behind the last layer; None: what is there is a mean."""
        if self.connections.averaged:
            return None
        return self._mixing("model.hc_head.hc_", self.connections.streams, 1)

    def _mixing(self, name: str, outputs: int, scales: int) -> StreamMixing:
        shapes = (("fn", (outputs, self.connections.streams * self.hidden)), ("base", (outputs,)), ("scale", (scales,)))
        read = (read_exactly(self.matrices.checkpoint, f"{name}{part}", shape) for part, shape in shapes)
        matrix, base, scale = (each.to(self.device) for each in read)
        return StreamMixing(self.ops.pack_exactly(matrix), base, scale)
