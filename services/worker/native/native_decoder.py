"""A whole forward pass in one call of the library: for one rank, where nothing is exchanged between operations.

It computes what the decoder computes by single operations, bit for bit where the model has no post norms, and saves
their overhead: about seventy calls and as many allocations and wake-ups for each step.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from services.worker.model.config import ModelConfig
from services.worker.model.decoder import KvCaches, Layer, Weights
from services.worker.model.mlp import DenseMlp
from services.worker.native import library
from services.worker.native.kernels import ACTIVATIONS, Kernels, Packed, address_of, batch_of
from services.worker.native.memory import zeroed
from services.worker.ops import BatchMeta, PackedLinear


class ChainRows(Protocol):
    """See :class:`services.worker.speculation.chain.Chain`."""

    @property
    def steps(self) -> int: ...
    @property
    def sequences(self) -> int: ...
    @property
    def stride(self) -> int: ...
    def meta(self, step: int) -> BatchMeta: ...


class Foreseeing(NamedTuple):
    """What EAGLE's layer has beside a decoder's."""

    joined: PackedLinear
    """[hidden, 2 * hidden]: a row begins as this of its token's embedding and of the feature given with it."""
    has_input_norm: bool


class NativeDecoder:
    """Holds the weights, and the library's workspace, which grows to the largest batch. Used from one thread."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kernels: Kernels,
        number: int,
        dtype: torch.dtype,
        foreseeing: Foreseeing | None = None,
    ) -> None:
        """`weights` must be whole, and packed as `number` (library.SINGLE or HALF), which holds a `dtype`.
        `foreseeing`: it is EAGLE's, and runs by `foresee`."""
        self._kernels = kernels
        self._weights = weights
        self._vocab_size = config.vocab_size
        assert weights.embedding is not None, "the model is whole"
        assert weights.head is not None
        # The embedding is a bfloat16 or float32 table for the library; a float16 one is converted.
        self._embedding = weights.embedding.to(dtype).contiguous()
        layers = (library.DecoderLayer * len(weights.layers))(*map(_layer, weights.layers))
        described = self._described(config, weights.embedding, number)
        described.final_norm = address_of(weights.final_norm)
        described.head = _linear(weights.head)
        if foreseeing is not None:
            described.joined = _linear(foreseeing.joined)
            if not foreseeing.has_input_norm:
                layers[0].input_norm = None
        self._foreseeing = foreseeing
        self._decoder: int = kernels.library.baton_decoder(kernels.pool, ctypes.byref(described), layers)
        self._caches: tuple[KvCaches, object, object] | None = None
        self._logits = torch.empty(0)

    def __del__(self) -> None:
        if getattr(self, "_decoder", None):
            self._kernels.library.baton_decoder_free(self._decoder)

    def forward(self, ids: Tensor, meta: BatchMeta, caches: KvCaches, features: Tensor | None = None) -> Tensor | None:
        """As the decoder's; the logits are overwritten by the next call."""
        return self._run(ids, meta, caches, features, None, len(meta.logits_rows))

    def foresee(
        self, ids: Tensor, given: Tensor, meta: BatchMeta, caches: KvCaches, *, wants_logits: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See :class:`services.worker.speculation.eagle_layer.EaglePass`."""
        features = torch.empty(given.shape)
        rows = len(meta.logits_rows) if wants_logits else 0
        return features, self._run(ids, meta, caches, features, given.float().contiguous(), rows)

    def draft_on(self, first: Tensor, rows: ChainRows, caches: KvCaches, given: Tensor | None = None) -> Tensor:
        """See :class:`services.worker.speculation.chain.DraftsOn`."""
        ids = torch.empty(rows.steps + 1, rows.sequences, dtype=torch.int32)
        ids[0] = first
        features = None if given is None else given.float().clone()
        asked = self._asked(first, rows.meta(0), caches, features, features, rows.sequences)
        if not self._kernels.library.baton_decoder_draft_on(
            self._decoder, ctypes.byref(asked), rows.steps, rows.stride, ids.data_ptr()
        ):
            raise IndexError(f"a token id is outside of the vocabulary of {self._vocab_size}")
        return ids

    def _run(
        self,
        ids: Tensor,
        meta: BatchMeta,
        caches: KvCaches,
        features: Tensor | None,
        given: Tensor | None,
        rows: int,
    ) -> Tensor | None:
        asked = self._asked(ids, meta, caches, features, given, rows)
        if not self._kernels.library.baton_decoder_run(self._decoder, ctypes.byref(asked)):
            raise IndexError(f"a token id is outside of the vocabulary of {self._vocab_size}")
        return self._logits[:rows] if rows else None

    def _asked(
        self,
        ids: Tensor,
        meta: BatchMeta,
        caches: KvCaches,
        features: Tensor | None,
        given: Tensor | None,
        rows: int,
    ) -> library.Forward:
        keys, values = self._pointers(caches)
        return library.Forward(
            *(ids.data_ptr(), batch_of(meta), meta.logits_rows.data_ptr(), rows),
            *(keys, values, self._room(rows).data_ptr(), address_of(features), address_of(given)),
        )

    def _room(self, rows: int) -> Tensor:
        """[rows, vocab]; kept, for fresh memory costs a page fault for each 4 kB."""
        if len(self._logits) < rows:
            self._logits = zeroed(rows * self._vocab_size * 4).view(torch.float32).view(rows, self._vocab_size)
        return self._logits[:rows]

    def _pointers(self, caches: KvCaches) -> tuple[object, object]:
        if self._caches is None or self._caches[0] is not caches:
            array = ctypes.c_void_p * len(caches)
            keys = array(*(cache[0].data_ptr() for cache in caches))
            values = array(*(cache[1].data_ptr() for cache in caches))
            self._caches = (caches, keys, values)
        return self._caches[1:]

    def _described(self, config: ModelConfig, embedding: Tensor, number: int) -> library.DecoderConfig:
        scale = config.embedding_scale
        rounded = 1.0 if scale is None else float(embedding.new_tensor(scale))
        return library.DecoderConfig(
            number=number,
            layers=config.num_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab=config.vocab_size,
            activation=ACTIVATIONS[config.activation],
            eps=config.norm_eps,
            attention_scale=config.attention_scale,
            attention_softcap=config.attention_softcap or 0.0,
            logits_softcap=config.logits_softcap or 0.0,
            embedding_scale=rounded,
            embedding=self._embedding.data_ptr(),
        )


def _layer(layer: Layer) -> library.DecoderLayer:
    assert isinstance(layer.mlp, DenseMlp), "NativeOps.fuse refuses mixtures"
    return library.DecoderLayer(
        input_norm=layer.input_norm.data_ptr(),
        q_norm=address_of(layer.q_norm),
        k_norm=address_of(layer.k_norm),
        attention_post_norm=address_of(layer.attention_post_norm),
        mlp_norm=layer.mlp_norm.data_ptr(),
        mlp_post_norm=address_of(layer.mlp_post_norm),
        cos_sin=layer.cos_sin.data_ptr(),
        qkv=_linear(layer.qkv),
        output=_linear(layer.output),
        gate_up=_linear(layer.mlp.gate_up),
        down=_linear(layer.mlp.down),
        window=layer.window or 0,
    )


def _linear(packed: PackedLinear) -> library.Linear:
    assert isinstance(packed, Packed)
    return packed.linear
