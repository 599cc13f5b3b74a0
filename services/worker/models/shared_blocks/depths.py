"""Reads what a layer has of its own beside a block that layers at several depths share."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import NamedTuple

from services.worker.models.checkpoint import TensorSource
from services.worker.models.config import ModelConfig, SharedBlocks
from services.worker.models.hf_layers.shared import SHARED_BLOCK
from services.worker.models.hf_layers.tensor_names import tensor_names
from services.worker.models.quantization.matrices import MatrixLoader
from services.worker.models.sharding import LayerShard
from services.worker.models.weights import DenseMlp, DepthWeights, LayerWeights, LowRankInputs

_Part = tuple[str, int, list[tuple[int, int]]]
"""What a module's adapter is called, the module's outputs, and which of them a rank has, from and to."""


class DepthLoader(NamedTuple):
    """Of a model with shared blocks, for one rank."""

    matrices: MatrixLoader
    config: ModelConfig
    share: LayerShard
    shared: SharedBlocks

    def at_depth(self, block: LayerWeights, layer: str, home: str, depth: int) -> LayerWeights:
        """`block`, whose tensors begin with `home`, in the layer whose tensors begin with `layer`. Raises
        ModelError."""
        hidden = self.config.hidden_size
        output = self.matrices.read(f"{layer}.linear", (hidden, hidden))
        return replace(
            with_own_matrices(block),
            depth=DepthWeights(
                output=self.matrices.pack_linear(output, None),
                qkv=self._attention(home, depth) if self.shared.adapts_attention else None,
                gate_up=self._gate_up(home, depth),
            ),
        )

    def _attention(self, home: str, depth: int) -> LowRankInputs:
        dim, name = self.config.head_dim, f"{home}.self_attn"
        heads, kv = ((first * dim, end * dim) for first, end in (self.share.heads, self.share.kv_heads))
        sizes = {"q": self.config.num_heads * dim, "k": self.config.num_kv_heads * dim}
        parts: list[_Part] = [
            (f"{name}.linear_{part}_adapter_list.{depth}", sizes.get(part, sizes["k"]), [heads if part == "q" else kv])
            for part in "qkv"
        ]
        return self._low_rank(parts, 2 * self.config.hidden_size)

    def _gate_up(self, home: str, depth: int) -> LowRankInputs:
        size, (first, end) = self.config.intermediate_size, self.share.mlp
        name = f"{home}.feed_forward.gate_up_proj_adapter_list.{depth}"
        rows = [(first, end), (size + first, size + end)]
        return self._low_rank([(name, 2 * size, rows)], self.config.hidden_size)

    def _low_rank(self, parts: list[_Part], inputs: int) -> LowRankInputs:
        read, rank = self.matrices.read, self.shared.adapter_rank
        downs = [read(f"{name}.0", (rank, inputs)) for name, _, _ in parts]
        ups = [[read(f"{name}.1", (size, rank), rows=each) for each in rows] for name, size, rows in parts]
        return LowRankInputs(
            down=self.matrices.pack_linear(self.matrices.join(downs), None),
            ups=tuple(self.matrices.pack_linear(self.matrices.join(each), None) for each in ups),
        )


def with_own_matrices(block: LayerWeights) -> LayerWeights:
    """A layer of the same weights. Its matrices are in memory once: what is new of them is what adapters of requests
    know them by."""
    mlp = block.mlp
    assert isinstance(mlp, DenseMlp), "no mixture is shared"
    own = replace(mlp, gate_up=copy(mlp.gate_up), down=copy(mlp.down))
    return replace(block, qkv=copy(block.qkv), output=copy(block.output), mlp=own)


def home_of(checkpoint: TensorSource, config: ModelConfig, block: int) -> str:
    """What the tensors of a shared block begin with: those of the first of its layers that the checkpoint has them
    of."""
    names, shared = tensor_names(config.architecture), config.shared
    assert shared is not None, "there are such blocks"
    layers = (each for each in config.layers if each.depth is not None and shared.block_of(each.depth) == block)
    homes = [f"{names.layers}.{each.blocks[0]}.{SHARED_BLOCK}" for each in layers if each.blocks is not None]
    return next((each for each in homes if f"{each}.{names.input_norm}.weight" in checkpoint), homes[0])
