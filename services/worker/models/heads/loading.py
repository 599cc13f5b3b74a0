"""Reads the matrix that makes a rank's queries, keys and values, of one module of a checkpoint or of several."""

from __future__ import annotations

from torch import Tensor

from services.worker.models.checkpoint import TensorSource
from services.worker.models.config import ModelConfig
from services.worker.models.heads.rows import HeadRows, head_rows
from services.worker.models.quantization.matrices import Matrix, MatrixLoader, joined, permuted
from services.worker.models.sharding import LayerShard
from services.worker.ops.interface import PackedLinear


def read_heads(
    matrices: MatrixLoader,
    checkpoint: TensorSource,
    config: ModelConfig,
    share: LayerShard,
    name: str,
    inputs: int,
    kv_heads: int | None = None,
) -> PackedLinear:
    """Queries, keys and values, one below the other, of `inputs` elements of a row; `name`: of the attention.
    `kv_heads`: see `LayerConfig`. Raises ModelError where a tensor is missing or misshapen."""
    parts = head_rows(config, share, kv_heads)
    matrix = matrices.join([_weight(matrices, each, name, inputs) for each in parts])
    biases = [_bias(checkpoint, each, name) for each in parts] if config.qkv_bias else []
    return matrices.pack_linear(matrix, joined(biases) if biases else None)


def _weight(matrices: MatrixLoader, part: HeadRows, name: str, inputs: int) -> Matrix:
    read = matrices.read(f"{name}.{part.module}", (part.outputs, inputs), rows=part.span)
    return permuted(read, part.rows - part.span[0]) if isinstance(part.rows, Tensor) else read


def _bias(checkpoint: TensorSource, part: HeadRows, name: str) -> Tensor:
    read = checkpoint.read(f"{name}.{part.module}.bias", (part.outputs,), rows=part.span)
    return read[(part.rows - part.span[0]).to(read.device)] if isinstance(part.rows, Tensor) else read
