"""Reads one layer's indexer of blocks from a checkpoint, for some of its heads."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from services.worker.models.config import BlockIndexConfig, ModelConfig
from services.worker.models.quantization.matrices import MatrixLoader
from services.worker.models.sharding import LayerShard
from services.worker.models.weights import BlockIndexWeights


def read_block_index(
    matrices: MatrixLoader,
    config: ModelConfig,
    index: BlockIndexConfig,
    share: LayerShard,
    name: str,
    norm: Callable[[str, int], Tensor],
) -> BlockIndexWeights:
    """Whose tensors begin with `name`; `norm` reads the weight of one. Never rounded beyond what the checkpoint is: it
    only chooses, as routers do. Raises ModelError where a tensor is missing or misshapen."""
    hidden, (first, end) = config.hidden_size, share.kv_heads
    if index.pooled:
        whole = matrices.numbers(matrices.read(f"{name}.index_qk_proj", ((index.heads + 1) * index.dim, hidden)))
        q_norm, k_norm = (norm(f"{name}.{each}_layernorm.weight", index.dim) for each in ("q", "k"))
        return BlockIndexWeights(matrices.pack(whole, None), q_norm, k_norm)
    rows = (first * index.dim, end * index.dim)
    queries = matrices.read(f"{name}.q_proj", (index.heads * index.dim, hidden), rows=rows)
    keys = matrices.read(f"{name}.k_proj", (index.dim, hidden))
    inputs = matrices.join([matrices.numbers(each) for each in (queries, keys)])
    return BlockIndexWeights(
        inputs=matrices.pack(inputs, None),
        q_norm=norm(f"{name}.q_norm.weight", index.dim),
        k_norm=norm(f"{name}.k_norm.weight", index.dim),
    )
