"""The forward pass of decoders some of whose layers choose the blocks of keys that they attend to (MiniMax-M3)."""

from __future__ import annotations

import dataclasses
from itertools import count
from typing import NamedTuple

from msgspec.structs import replace
from torch import Tensor

from services.worker.distributed.communicator import Communicator, Pipeline
from services.worker.kv.copier import RankKvCache
from services.worker.kv.state_pages import RankCheckpoints
from services.worker.models.block_index.attention import BlockIndex, ChosenBlocks
from services.worker.models.block_index.cache import IndexKeyLayout
from services.worker.models.config import BlockIndexConfig, ModelConfig
from services.worker.models.decoder import Decoder
from services.worker.models.sharding import LayerShard, PipelineStage
from services.worker.models.weights import DecoderWeights, KvCaches, LayerWeights
from services.worker.ops.interface import BatchMeta, Ops


class _ChosenOfStep(NamedTuple):
    """What a layer's indexer chose for a step; None: all."""

    meta: BatchMeta
    blocks: ChosenBlocks | None


class ChosenBlocksDecoder(Decoder):
    """A decoder whose caches go on behind its layers', with the keys of indexers."""

    def __init__(
        self,
        config: ModelConfig,
        index: BlockIndexConfig,
        weights: DecoderWeights,
        share: LayerShard,
        ops: Ops,
        communicator: Communicator,
        pipeline: Pipeline,
        stages: tuple[PipelineStage, ...],
    ) -> None:
        """`stages`: all that there are."""
        super().__init__(config, weights, share, ops, communicator, pipeline)
        self._index, self._stages = index, stages
        self._choice: _ChosenOfStep | None = None
        self._layout = IndexKeyLayout(config, index, share, ops.block_size)
        self._held = [each.num_layers + self._layout.layers(each) for each in stages]
        numbers = count()
        self._numbers = {id(each): next(numbers) for each in weights.layers if each.block_index is not None}
        self._keys: list[tuple[Tensor, Tensor]] = []

    @property
    def _holders(self) -> int:
        return self._layout.layers(self._stages[self._pipeline.stage])

    @property
    def capturable(self) -> bool:
        """How long contexts are is asked of the host."""
        return False

    def allocate_kv(self, num_blocks: int, sequences: int = 0) -> KvCaches:
        """See `CausalLm.allocate_kv`; behind those of the layers, what holds keys of indexers."""
        sizes = (num_blocks, self._share.num_kv_heads, self._config.head_dim)
        return super().allocate_kv(num_blocks, sequences) + [
            self._ops.allocate_kv(*sizes) for _ in range(self._holders)
        ]

    @property
    def kv_block_bytes(self) -> int:
        """See `CausalLm.kv_block_bytes`."""
        each = self._ops.kv_block_bytes(self._share.num_kv_heads, self._config.head_dim)
        return super().kv_block_bytes + self._holders * each

    def share_kv(self, caches: KvCaches, model: str, checkpoints: RankCheckpoints | None = None) -> RankKvCache | None:
        """See `CausalLm.share_kv`."""
        shared = super().share_kv(caches, self._layout.digest(model, self._ops.name), checkpoints)
        assert shared is not None, "no layer has states"
        layout = replace(shared.layout, layers=sum(self._held))
        return dataclasses.replace(shared, layout=layout, first_layer=sum(self._held[: self._pipeline.stage]))

    def forward(self, ids: Tensor, meta: BatchMeta, caches: KvCaches, features: Tensor | None = None) -> Tensor | None:
        """See `Decoder.forward`."""
        layers = len(self._weights.layers)
        self._keys = caches[layers:]
        return super().forward(ids, meta, caches[:layers], features)

    def queries(self, layer: LayerWeights, x: Tensor, meta: BatchMeta, cache: tuple[Tensor, Tensor]) -> Tensor:
        """See `Decoder.queries`; what the layer attends to is chosen."""
        self._choice = _ChosenOfStep(meta, None)
        if layer.block_index is not None:
            how = (self._index, layer.block_index, self._ops, self._config.norm_eps, self._config.rotated_dim)
            keys = self._layout.keys(self._numbers[id(layer)], self._keys)
            self._choice = _ChosenOfStep(meta, BlockIndex(*how).choose(x, meta, layer.cos_sin, keys))
        return super().queries(layer, x, meta, cache)

    def _attention(self, layer: LayerWeights, queries: Tensor, meta: BatchMeta, cache: tuple[Tensor, Tensor]) -> Tensor:
        assert self._choice is not None, "queries come before"
        assert self._choice.meta is meta, "it was chosen for this step"
        chosen, (rows, _, dim) = self._choice.blocks, queries.shape
        if chosen is None:
            return super()._attention(layer, queries, meta, cache)
        heads = self._share.num_kv_heads
        keys, values = (each.view(each.shape[0] * heads, 1, *each.shape[2:]) for each in cache)
        mixed = super()._attention(layer, queries.reshape(rows * heads, -1, dim), chosen.reads(meta), (keys, values))
        return mixed.view(rows, -1)
