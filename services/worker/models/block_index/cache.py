"""Where the keys of an indexer of blocks lie: in blocks of layers behind the model's own, so that whatever knows blocks
knows them. One such layer holds the keys of as many layers as have room in its keys, and as many in its values."""

from __future__ import annotations

from hashlib import blake2b

from torch import Tensor

from services.worker.models.config import BlockIndexConfig, ModelConfig, ModelError
from services.worker.models.sharding import LayerShard, PipelineStage

_WHOLE_ELEMENTS = 16
"""Heads of a multiple of these fill the native layout, whose bytes are copied to stores and back as they are then."""


def check_index_keys(config: ModelConfig, index: BlockIndexConfig, share: LayerShard, block_size: int) -> None:
    """Before weights are read. Raises ModelError for sizes that do not go into each other."""
    if index.block % block_size:
        raise ModelError(
            f"block_size {block_size} does not divide {index.block_key} {index.block}, as a max_model_len of more than "
            f"{index.longest} tokens needs it to"
        )
    if config.head_dim % _WHOLE_ELEMENTS:
        raise ModelError(f"head_dim {config.head_dim} is no multiple of {_WHOLE_ELEMENTS}, as index keys need")
    if share.num_kv_heads * config.head_dim < index.dim:
        raise ModelError(
            f"{index.dim_key} {index.dim} is more than the {share.num_kv_heads} key/value heads of a rank have: choose "
            "a smaller --tp"
        )


class IndexKeyLayout:
    """Of a rank that has some key/value heads, on each stage; of sizes that `check_index_keys` lets through."""

    def __init__(self, config: ModelConfig, index: BlockIndexConfig, share: LayerShard, block_size: int) -> None:
        self._dim, self._block_size, self._heads = index.dim, block_size, share.num_kv_heads
        self._of_half = share.num_kv_heads * config.head_dim // index.dim
        self._chooses = [layer.chooses for layer in config.layers]

    def layers(self, stage: PipelineStage) -> int:
        """Layers that hold keys, behind those of the stage."""
        return self.layers_of(sum(self._chooses[stage.first_layer : stage.end_layer]))

    def layers_of(self, choosing: int) -> int:
        """The same of so many that choose."""
        return -(-choosing // (2 * self._of_half))

    def keys(self, number: int, holders: list[tuple[Tensor, Tensor]]) -> Tensor:
        """[blocks, 1, block_size, dim] of the layer of this number among the stage's that choose."""
        half, place = divmod(number, self._of_half)
        flat = holders[half // 2][half % 2].flatten(1)
        size = self._block_size * self._dim
        return flat[:, place * size : (place + 1) * size].view(len(flat), 1, self._block_size, self._dim)

    def digest(self, model: str, operations: str) -> str:
        """What tells blocks that lie so from those of other shares of heads, and of other operations: bytes are not
        converted."""
        told = f"{model} {operations} {self._heads} heads, {self._of_half} of {self._dim}"
        return blake2b(told.encode(), digest_size=len(model) // 2 or 1).hexdigest()
