"""The forward pass of decoders with several residual streams, whatever their attention is."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial

from torch import Tensor

from services.worker.kv.layer_groups import allocate_caches
from services.worker.models.compressed.attention import CompressedAttention, LayerStep
from services.worker.models.compressed.cache import CompressedLayout
from services.worker.models.config import ModelError
from services.worker.models.decoder import Decoder
from services.worker.models.hyper_connections.streams import close_streams, open_block
from services.worker.models.weights import KvCaches, LayerWeights, MixtureMlp
from services.worker.ops.interface import BatchMeta, InputRows, Ops


class StreamsDecoder(Decoder):
    """HY4's and GLM-5-Next's. Layers pass one by one, by single operations."""

    @property
    def capturable(self) -> bool:
        """How long contexts are, and which windows end, is asked of the device."""
        return False

    def use_taps(self, layers: tuple[int, ...]) -> None:
        """Raises ModelError."""
        raise ModelError("layers of this model pass several streams on: what goes into a layer is not kept")

    def forward(self, ids: Tensor, meta: BatchMeta, caches: KvCaches, features: Tensor | None = None) -> Tensor | None:
        """See `Decoder.forward`."""
        connections, layers, eps = self._config.connections, self._weights.layers, self._config.norm_eps
        assert connections is not None, "there are streams"
        self._rows.begin(len(ids))
        (rows, given), wanted = self._first_rows(ids, meta), meta.logits_rows
        ids = ids if given is None else self._named(ids, given)
        streams = rows.view(len(ids), -1, self._config.hidden_size).expand(-1, connections.streams, -1).contiguous()
        for number in range(len(layers)):
            last = number == len(layers) - 1 and self._weights.final_norm is not None and features is None
            streams = self._layer(number, streams, ids, meta, caches, wanted if last else None)
            if last and not len(wanted):
                return None
        if self._weights.final_norm is None:
            self._pipeline.send(streams.flatten(1))
            return None
        x = close_streams(self._ops, streams, self._weights.streams, connections, eps)
        if not connections.rank:
            x = self._ops.rms_norm(x, self._weights.final_norm, eps)
        if features is None:
            return self.logits(x)
        features.copy_(x)
        return self.logits(x.index_select(0, wanted)) if len(wanted) else None

    def _layer(
        self, number: int, streams: Tensor, ids: Tensor, meta: BatchMeta, caches: KvCaches, wanted: Tensor | None
    ) -> Tensor:
        """streams [n, S, hidden] → those behind the layer of this number on this rank; of the rows `wanted`, if given:
        of none, the cache is filled and what is given means nothing."""
        layer, config, eps = self._weights.layers[number], self._config.connections, self._config.norm_eps
        assert layer.streams is not None
        assert config is not None
        streams = self._with_grams(layer, streams, ids, meta, caches)
        x, around = open_block(self._ops, streams, layer.streams[0], config, eps)
        attend = self._attention_of(number, self._normed(x, layer.input_norm), meta, caches)
        if wanted is not None and not len(wanted):
            return streams
        mixed = attend()
        if wanted is not None and len(wanted) < len(ids):
            mixed, around, ids = mixed.index_select(0, wanted), around.select(wanted), ids.index_select(0, wanted)
        streams = around.close(self._rows.summed(self._ops.linear(mixed, layer.output)))
        x, around = open_block(self._ops, streams, layer.streams[1], config, eps)
        assert layer.mlp is not None, "every layer has one"
        mlp = layer.mlp.of_tokens(ids) if isinstance(layer.mlp, MixtureMlp) else layer.mlp
        return around.close(self._mlp_sum(layer, mlp, self._normed(x, layer.mlp_norm)))

    def _named(self, ids: Tensor, given: InputRows) -> Tensor:
        """ids [n], of which those of rows that are `given` mean nothing → what layers read of them."""
        return ids

    def _with_grams(
        self, layer: LayerWeights, streams: Tensor, ids: Tensor, meta: BatchMeta, caches: KvCaches
    ) -> Tensor:
        """With what the layer adds of n-grams."""
        return streams

    def _attention_of(self, number: int, x: Tensor, meta: BatchMeta, caches: KvCaches) -> Callable[[], Tensor]:
        """x [n, hidden], normed → what computes the heads' values for them, [n, …], in the layer of this number on this
        rank; the cache has what is kept of the rows then."""
        layer, attention = self._weights.layers[number], self._latent
        if layer.mixer is not None:
            mixed = self._states.mixed(layer, self._inputs(layer, x), x, meta, caches[number])
            return lambda: mixed
        if attention is None:
            return partial(self._gated, layer, self.queries(layer, x, meta, caches[number]), meta, caches[number])
        queries = attention.queries(layer, x, meta, caches[number])
        return partial(attention.attend, layer, queries, meta, caches[number])

    def _gated(self, layer: LayerWeights, queries: Tensor, meta: BatchMeta, cache: tuple[Tensor, Tensor]) -> Tensor:
        """What `queries` of gated attention makes → [n, H * D]"""
        mixed = self._attention(layer, queries[0], meta, cache)
        return self._ops.sigmoid_gated(mixed, queries[1].flatten(1))

    def _normed(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """None: what is read of the streams is normed."""
        return x if norm is None else self._ops.rms_norm(x, norm, self._config.norm_eps)


class CompressedDecoder(StreamsDecoder):
    """DeepSeek-V4's."""

    def _compute_by(self, ops: Ops) -> None:
        super()._compute_by(ops)
        self._attention_over = CompressedAttention(self._config, ops, self._share.num_heads)

    @cached_property
    def _layout(self) -> CompressedLayout:
        return CompressedLayout(self._config, self._ops.block_size)

    @property
    def parts_of_token(self) -> tuple[int, int]:
        """See `Decoder.parts_of_token`: a key, and what entries are made of."""
        return self._layout.key_dim, self._layout.together if self._groups is None else self._layout.apart

    @property
    def windows(self) -> tuple[int | None, ...]:
        """See `CausalLm.windows`: of the layers that hold entries alone, then of what a layer has of tokens. In stages
        each layer has all in one block."""
        if self._pipeline.stages > 1:
            return (None,) * self._config.num_layers
        return (None,) * self._layout.holders + (self._layout.window,) * self._config.num_layers

    def allocate_kv(self, num_blocks: int, sequences: int = 0) -> KvCaches:
        """See `CausalLm.allocate_kv`; in groups those of the layers that hold entries come first."""
        layers = len(self._weights.layers) + (0 if self._groups is None else self._layout.holders)
        return allocate_caches(
            layers, self._groups, lambda: self._ops.latents.allocate(num_blocks, *self.parts_of_token)
        )

    def check_inputs(self, *, of_clients: bool) -> None:
        """Raises ModelError."""
        raise ModelError("enable_prompt_embeds: experts are chosen by tokens, which embeddings do not say")

    def _attention_of(self, number: int, x: Tensor, meta: BatchMeta, caches: KvCaches) -> Callable[[], Tensor]:
        step = self._step(number, self._weights.layers[number], meta, caches)
        return partial(self._attention_over.attend, step, self._attention_over.queries(step, x))

    def _step(self, number: int, layer: LayerWeights, meta: BatchMeta, caches: KvCaches) -> LayerStep:
        layout, groups, index = self._layout, self._groups, number + self._weights.first_layer
        kind, place = self._config.layers[index].compression, layout.places[index]
        if groups is None:
            entries = None if kind is None else layout.entries_of(caches[number][1], kind, meta, None)
            return LayerStep(layer, kind, layout.rows_of(caches[number], kind, meta), entries)
        own = layout.holders + number
        rows = layout.rows_of(caches[own], kind, meta.of_group(groups.group_of[own]))
        if kind is None or place is None:
            return LayerStep(layer, None, rows, None)
        of_holder = meta.of_group(groups.group_of[place.holder])
        return LayerStep(layer, kind, rows, layout.entries_of(caches[place.holder][1], kind, of_holder, place))
