"""Reads one layer's gated attention from a checkpoint: beside each head's query stands its gate (Qiu et al., "Gated
Attention for Large Language Models", arXiv:2505.06708)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.models.config import ModelConfig
from services.worker.models.quantization.matrices import Matrix, MatrixLoader, permuted
from services.worker.models.rope import partly_rotated
from services.worker.models.sharding import LayerShard
from services.worker.ops.interface import PackedLinear


class GatedInputs(NamedTuple):
    """What a row is multiplied with; see `LayerWeights`."""

    qkv: PackedLinear
    gate: PackedLinear


class _Projection(NamedTuple):
    matrix: Matrix
    bias: Tensor | None

    def chosen(self, outputs: Tensor) -> _Projection:
        """Of these outputs, in this order."""
        bias = None if self.bias is None else self.bias[outputs.to(self.bias.device)]
        return _Projection(permuted(self.matrix, outputs), bias)


def read_gated_inputs(matrices: MatrixLoader, config: ModelConfig, share: LayerShard, name: str) -> GatedInputs:
    """Of a rank's heads of the attention whose tensors begin with `name`. Elements of queries and keys are in the order
    in which whole heads are rotated. Raises ModelError."""
    dim, heads, kv_heads = config.head_dim, config.num_heads, config.num_kv_heads

    def read(part: str, outputs: int) -> _Projection:
        whole = f"{name}.{part}_proj"
        bias = matrices.checkpoint.read(f"{whole}.bias", (outputs,)) if config.qkv_bias else None
        return _Projection(matrices.read(whole, (outputs, config.hidden_size)), bias)

    order = partly_rotated(dim, config.rotated_dim)
    both, keys = read("q", 2 * heads * dim), read("k", kv_heads * dim)
    own, own_keys = slice(*share.heads), slice(*share.kv_heads)
    of_heads = torch.arange(2 * heads * dim).view(heads, 2, dim)[own]
    of_keys = torch.arange(kv_heads * dim).view(kv_heads, dim)[own_keys]
    queries, gates = both.chosen(of_heads[:, 0, order].flatten()), both.chosen(of_heads[:, 1].flatten())
    rotated = keys.chosen(of_keys[:, order].flatten())
    parts = (queries, rotated, read("v", kv_heads * dim).chosen(of_keys.flatten()))
    biases = [part.bias for part in parts if part.bias is not None]
    return GatedInputs(
        matrices.pack_linear(matrices.join([part.matrix for part in parts]), torch.cat(biases) if biases else None),
        matrices.pack_linear(gates.matrix, gates.bias),
    )
