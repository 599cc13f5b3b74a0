"""Reads one layer's gated attention from a checkpoint: beside each head's query stands its gate (Qiu et al., "Gated
Attention for Large Language Models", arXiv:2505.06708), or a head has one number for all its elements (LFM3)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.models.config import ModelConfig
from services.worker.models.hf_layers.tensor_names import tensor_names
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

    own = gated_outputs(config, share)
    both, keys, values = read("q", 2 * heads * dim), read("k", kv_heads * dim), read("v", kv_heads * dim)
    gates = both.chosen(own.gates)
    parts = (both.chosen(own.queries), keys.chosen(own.keys), values.chosen(own.values))
    biases = [part.bias for part in parts if part.bias is not None]
    return GatedInputs(
        matrices.pack_linear(matrices.join([part.matrix for part in parts]), torch.cat(biases) if biases else None),
        matrices.pack_linear(gates.matrix, gates.bias),
    )


def read_head_gates(matrices: MatrixLoader, config: ModelConfig, share: LayerShard, name: str) -> PackedLinear:
    """The gates of a rank's heads in the attention whose tensors begin with `name`, that of a head once for each of its
    elements. Raises ModelError."""
    module = f"{name}.{tensor_names(config.architecture).head_gate}"
    gates = matrices.read(module, (config.num_heads, config.hidden_size))
    return matrices.pack_linear(permuted(gates, head_gate_outputs(config, share)), None)


def head_gate_outputs(config: ModelConfig, share: LayerShard) -> Tensor:
    """[H * D] which output of the module of gates is taken for each element of a rank's heads."""
    return torch.arange(*share.heads).repeat_interleave(config.head_dim)


class GatedOutputs(NamedTuple):
    """Which outputs of `q_proj`, where queries and gates are, of `k_proj` and of `v_proj` a rank has, in its order."""

    queries: Tensor
    gates: Tensor
    keys: Tensor
    values: Tensor


def gated_outputs(config: ModelConfig, share: LayerShard) -> GatedOutputs:
    """Of a rank's heads."""
    dim, heads, kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
    order = partly_rotated(dim, config.rotated_dim)
    of_heads = torch.arange(2 * heads * dim).view(heads, 2, dim)[slice(*share.heads)]
    of_keys = torch.arange(kv_heads * dim).view(kv_heads, dim)[slice(*share.kv_heads)]
    return GatedOutputs(
        of_heads[:, 0, order].flatten(),
        of_heads[:, 1].flatten(),
        of_keys[:, order].flatten(),
        of_keys.flatten(),
    )
