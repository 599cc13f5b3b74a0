"""A decoder that says when the cache of each layer is filled. Knows no connector."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from services.worker.distributed.communicator import Communicator, Pipeline
from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder
from services.worker.models.sharding import LayerShard
from services.worker.models.weights import DecoderWeights, LayerWeights
from services.worker.ops.interface import BatchMeta, Ops


class LayerwiseDecoder(Decoder):
    """A decoder that says when each layer's keys and values are in its cache, while those behind it are still to be
    computed: for a KV connector that saves layer by layer."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        share: LayerShard,
        ops: Ops,
        communicator: Communicator,
        pipeline: Pipeline | None,
        on_layer: Callable[[int], None],
    ) -> None:
        """`on_layer`: called with each layer's number on this rank, in their order, on the thread that computes."""
        super().__init__(config, weights, share, ops, communicator, pipeline)
        self._on_layer = on_layer
        self._numbers = {id(layer): number for number, layer in enumerate(weights.layers)}

    def queries(self, layer: LayerWeights, x: Tensor, meta: BatchMeta, cache: tuple[Tensor, Tensor]) -> Tensor:
        """See `Decoder.queries`; keys and values are said to be there."""
        queries = super().queries(layer, x, meta, cache)
        self._on_layer(self._numbers[id(layer)])
        return queries
