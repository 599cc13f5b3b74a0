"""The forward pass of decoders each element of whose streams is gated, to which layers add embeddings of n-grams
(Qwen4)."""

from __future__ import annotations

from itertools import count

import torch
from torch import Tensor

from services.worker.models.block_index.attention import BlockIndex, ChosenBlocks
from services.worker.models.block_index.cache import IndexKeyLayout
from services.worker.models.config import ModelError
from services.worker.models.grams.adding import GramAdder
from services.worker.models.hyper_connections.decoder import StreamsDecoder
from services.worker.models.states.sequence_states import empty_states
from services.worker.models.weights import KvCaches, LayerWeights
from services.worker.ops.interface import BatchMeta, InputRows, Ops


class GatedStreamsDecoder(StreamsDecoder):
    """Caches go on behind its layers': with the keys of indexers; and of each layer with n-grams with the window of its
    convolution, and tokens."""

    def _compute_by(self, ops: Ops) -> None:
        super()._compute_by(ops)
        grams, index, eps = self._config.grams, self._config.block_index, self._config.norm_eps
        self._adder = None if grams is None else GramAdder(grams, ops, self._states.mix, eps)
        choosing, numbers = [layer for layer in self._weights.layers if layer.block_index is not None], count()
        self._numbers = {id(layer): next(numbers) for layer in choosing}
        self._layout = None
        if index is not None and choosing:
            self._layout = IndexKeyLayout(self._config, index, self._share, ops.block_size)
        first = len(self._weights.layers) + self._layers_behind
        with_grams = [layer for layer in self._weights.layers if layer.grams is not None]
        self._places = {id(layer): first + 2 * number for number, layer in enumerate(with_grams)}
        self._chosen: ChosenBlocks | None = None
        self._holders: KvCaches = []

    @property
    def _layers_behind(self) -> int:
        return 0 if self._layout is None else self._layout.layers_of(len(self._numbers))

    def _blocks_digest(self, model: str) -> str:
        return model if self._layout is None else self._layout.digest(model, self._ops.name)

    def allocate_kv(self, num_blocks: int, sequences: int = 0) -> KvCaches:
        """See `CausalLm.allocate_kv`."""
        sizes = (num_blocks, self._share.num_kv_heads, self._config.head_dim)
        caches = super().allocate_kv(num_blocks, sequences)
        caches += [self._ops.allocate_kv(*sizes) for _ in range(self._layers_behind)]
        for weights in (layer.grams for layer in self._weights.layers if layer.grams is not None):
            mixers = weights.convolution, weights.tokens
            caches += [empty_states(mixer, sequences, self.device) for mixer in mixers]
        return caches

    @property
    def kv_block_bytes(self) -> int:
        """See `CausalLm.kv_block_bytes`."""
        each = self._ops.kv_block_bytes(self._share.num_kv_heads, self._config.head_dim)
        return super().kv_block_bytes + self._layers_behind * each

    @property
    def state_bytes(self) -> int:
        """See `CausalLm.state_bytes`."""
        connections, grams = self._config.connections, self._config.grams
        if grams is None or connections is None:
            return super().state_bytes
        each = grams.state_elements(connections.streams * self._config.hidden_size)
        return super().state_bytes + len(self._places) * each * torch.float32.itemsize

    def check_inputs(self, *, of_clients: bool) -> None:
        """See `CausalLm.check_inputs`; where an indexer chooses, images are refused, too."""
        super().check_inputs(of_clients=of_clients)
        if of_clients and self._config.grams is not None:
            raise ModelError("enable_prompt_embeds: n-grams are made of tokens, which embeddings do not say")
        index = self._config.block_index
        if not of_clients and index is not None and self._layout is not None:
            raise ModelError(
                f"{self._config.architecture}: images are served up to a max_model_len of {index.longest} tokens, of "
                "which nothing is chosen: choose that, or --language-model-only"
            )

    def _named(self, ids: Tensor, given: InputRows) -> Tensor:
        """See `StreamsDecoder._named`."""
        grams = self._config.grams
        return ids if grams is None or grams.image is None else ids.index_fill(0, given.rows.long(), grams.image)

    def _with_grams(
        self, layer: LayerWeights, streams: Tensor, ids: Tensor, meta: BatchMeta, caches: KvCaches
    ) -> Tensor:
        if layer.block_index is not None:
            first = len(self._weights.layers)
            self._holders = caches[first : first + self._layers_behind]
        if layer.grams is None:
            return streams
        assert self._adder is not None, "there are n-grams"
        first = self._places[id(layer)]
        return streams + self._adder.added(layer.grams, streams, ids, meta, caches[first : first + 2])

    def queries(self, layer: LayerWeights, x: Tensor, meta: BatchMeta, cache: tuple[Tensor, Tensor]) -> Tensor:
        """See `Decoder.queries`; what the layer attends to is chosen."""
        index, self._chosen = self._config.block_index, None
        if layer.block_index is not None and index is not None and self._layout is not None:
            how = (index, layer.block_index, self._ops, self._config.norm_eps, self._config.rotated_dim)
            keys = self._layout.keys(self._numbers[id(layer)], self._holders)
            self._chosen = BlockIndex(*how).choose(x, meta, layer.cos_sin, keys)
        return super().queries(layer, x, meta, cache)

    def _attention(self, layer: LayerWeights, queries: Tensor, meta: BatchMeta, cache: tuple[Tensor, Tensor]) -> Tensor:
        step = meta if self._chosen is None else self._chosen.reads(meta)
        return super()._attention(layer, queries, step, cache)
