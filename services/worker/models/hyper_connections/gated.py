"""The forward pass of decoders each element of whose streams is gated, to which layers add embeddings of n-grams
(Qwen4)."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.models.grams.adding import GramAdder
from services.worker.models.hyper_connections.decoder import StreamsDecoder
from services.worker.models.states.sequence_states import empty_states
from services.worker.models.weights import KvCaches, LayerWeights
from services.worker.ops.interface import BatchMeta, Ops


class GatedStreamsDecoder(StreamsDecoder):
    """Caches go on behind its layers': of each layer with n-grams the window of its convolution, and tokens."""

    def _compute_by(self, ops: Ops) -> None:
        super()._compute_by(ops)
        grams, eps = self._config.grams, self._config.norm_eps
        self._adder = None if grams is None else GramAdder(grams, ops, self._states.mix, eps)
        with_grams = [layer for layer in self._weights.layers if layer.grams is not None]
        first = len(self._weights.layers)
        self._places = {id(layer): first + 2 * number for number, layer in enumerate(with_grams)}

    def allocate_kv(self, num_blocks: int, sequences: int = 0) -> KvCaches:
        """See `CausalLm.allocate_kv`."""
        caches = super().allocate_kv(num_blocks, sequences)
        for weights in (layer.grams for layer in self._weights.layers if layer.grams is not None):
            mixers = weights.convolution, weights.tokens
            caches += [empty_states(mixer, sequences, self.device) for mixer in mixers]
        return caches

    @property
    def state_bytes(self) -> int:
        """See `CausalLm.state_bytes`."""
        connections, grams = self._config.connections, self._config.grams
        if grams is None or connections is None:
            return super().state_bytes
        each = grams.state_elements(connections.streams * self._config.hidden_size)
        return super().state_bytes + len(self._places) * each * torch.float32.itemsize

    def _with_grams(
        self, layer: LayerWeights, streams: Tensor, ids: Tensor, meta: BatchMeta, caches: KvCaches
    ) -> Tensor:
        if layer.grams is None:
            return streams
        assert self._adder is not None, "there are n-grams"
        first = self._places[id(layer)]
        return streams + self._adder.added(layer.grams, streams, ids, meta, caches[first : first + 2])
