"""Models with adapters on their device: our decoder, and what `transformers` computes. They know slots, and not which
adapter has which."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from services.worker.models.config import ModelConfig, ModelError
from services.worker.models.decoder import Decoder
from services.worker.models.loaded_model import CausalLm
from services.worker.models.lora.adapted_latents import latent_products
from services.worker.models.lora.adapted_matrices import AdaptedMatrix, Projection, adapted_matrices, rank_rows
from services.worker.models.lora.adapted_modules import KEYS_AND_VALUES
from services.worker.models.lora.adapted_ops import AdaptedOps, EmbeddingProduct, LoraBatch
from services.worker.models.lora.adapter_files import LoraAdapter, read_adapter
from services.worker.models.native_decoder import NativeAdapters, NativeDecoder
from services.worker.models.weights import KvCaches, NamedModules, NamedProduct
from services.worker.ops.interface import BatchMeta, Ops
from services.worker.ops.low_rank import LowRankShape
from services.worker.ops.native.library import Adapters
from shared.ids import ModelName


class AdaptedModel(Protocol):
    """One rank's share of a model, with places for adapters."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    def read(self, name: ModelName, folder: Path) -> LoraAdapter:
        """An adapter of this model, into main memory. Raises ModelError, see `read_adapter`."""

    def load(self, slot: int, adapter: LoraAdapter) -> None:
        """Puts an adapter into a slot of the device."""

    def clear(self, slot: int) -> None:
        """Frees the slot."""

    def forward(
        self, batch: LoraBatch, ids: Tensor, meta: BatchMeta, caches: KvCaches, features: Tensor | None
    ) -> Tensor | None:
        """See `Decoder.forward`, with the adapters of `batch`."""

    def in_one_call(self, adapter: LoraAdapter) -> bool:
        """Whether decodes of sequences with `adapter` are one call of the native library."""

    def added(self, batch: LoraBatch) -> NativeAdded:
        """What such a call adds, of adapters that are `in_one_call`."""


class NativeAdded(NamedTuple):
    """What adapters add in one call of the native library."""

    adapters: Adapters
    batch: LoraBatch
    """Which `adapters` points to."""


class AdaptedDecoder:
    """A native decoder; see `AdaptedModel`."""

    def __init__(
        self, decoder: Decoder, config: ModelConfig, dtype: torch.dtype, max_loras: int, max_rank: int
    ) -> None:
        self._decoder, self._config, self._dtype, self._max_rank = decoder, config, dtype, max_rank
        self._matrices = adapted_matrices(decoder, config, max_loras, max_rank)
        self._embeddings: dict[int, EmbeddingProduct] = {}
        """By slot."""
        products = {id(matrix.packed): matrix.products for matrix in self._matrices}
        self._latents = latent_products(decoder, config)
        self._ops = AdaptedOps(decoder.ops, products, self._embeddings, self._latents)
        # What makes keys and values of latents is adapted on both sides of attention, operation by operation.
        single = decoder.native is None or self._latents is not None
        self._native = None if single else NativeAdapters(decoder.weights, products)
        self._adapted = decoder.on(cast(Ops, self._ops))
        self._embedding_memory = self._reserve_embeddings(max_loras)

    @property
    def device(self) -> torch.device:
        """See `AdaptedModel.device`."""
        return self._decoder.device

    def read(self, name: ModelName, folder: Path) -> LoraAdapter:
        """See `AdaptedModel.read`."""
        adapter = read_adapter(name, folder, self._config, self._max_rank)
        if self.device.type != "cpu" and any(module == KEYS_AND_VALUES for _, module in adapter.layers):
            raise ModelError(f"{folder}: target_modules: {KEYS_AND_VALUES} is not supported on {self.device.type}")
        return adapter

    def load(self, slot: int, adapter: LoraAdapter) -> None:
        """See `AdaptedModel.load`."""
        for matrix in self._matrices:
            matrix.load(slot, adapter, self._on_device)
        if self._latents is not None:
            self._latents.load(slot, adapter, self._on_device)
        if self._decoder.weights.embedding is not None and adapter.embedding is not None:
            a, b = adapter.embedding
            share = self._decoder.share
            words = self._on_device(rank_rows(a.T, share.vocab, share.padded_vocab))
            if self._embedding_memory is not None:
                words = self._embedding_memory[slot, : words.numel()].view(words.shape).copy_(words)
            self._embeddings[slot] = EmbeddingProduct(words, self._decoder.ops.pack_linear(self._on_device(b), None))

    def clear(self, slot: int) -> None:
        """See `AdaptedModel.clear`."""
        self._embeddings.pop(slot, None)
        if self._latents is not None:
            self._latents.clear(slot)
        for matrix in self._matrices:
            matrix.products.clear(slot)

    def forward(
        self, batch: LoraBatch, ids: Tensor, meta: BatchMeta, caches: KvCaches, features: Tensor | None
    ) -> Tensor | None:
        """See `AdaptedModel.forward`."""
        native, adapters = self._decoder.native, self._native
        whole = NativeDecoder.computes(meta) and not self._adapts_embedding(batch)
        if native is not None and adapters is not None and whole:
            added = adapters.of(batch.all.slots, batch.drawn.slots)
            return native.forward(ids, meta, caches, features, adapters=added)
        self._ops.batch = batch
        return self._adapted.forward(ids, meta, caches, features)

    def in_one_call(self, adapter: LoraAdapter) -> bool:
        """See `AdaptedModel.in_one_call`."""
        return self._native is not None and adapter.embedding is None

    def added(self, batch: LoraBatch) -> NativeAdded:
        """See `AdaptedModel.added`."""
        assert self._native is not None, "the caller has asked"
        return NativeAdded(self._native.of(batch.all.slots, batch.drawn.slots), batch)

    def _adapts_embedding(self, batch: LoraBatch) -> bool:
        return any(span.slot in self._embeddings for span in batch.all.spans)

    def _reserve_embeddings(self, max_loras: int) -> Tensor | None:
        """[slots, words times ranks] of a GPU: it is taken before KV memory is sized, which takes the rest."""
        untied = self._decoder.weights.embedding is not None and not self._config.tied_embeddings
        if self.device.type == "cpu" or not untied:
            return None
        words = self._decoder.share.padded_vocab * self._max_rank
        return torch.empty(max_loras, words, dtype=self._dtype, device=self.device)

    def _on_device(self, weight: Tensor) -> Tensor:
        """Contiguous, in the model's type."""
        return weight.to(self.device, self._dtype).contiguous()


@runtime_checkable
class NamedProducts(CausalLm, Protocol):
    """A decoder whose products are known by the names of the modules that make them."""

    def named_modules(self) -> NamedModules:
        """What adapters may change."""

    def multiply_by(self, ops: Ops) -> None:
        """Has these products computed by `ops`."""

    @property
    def device(self) -> torch.device:
        """Where its weights are."""


class AdaptedLibraryModel:
    """A model that `transformers` computes; see `AdaptedModel`. Its products are computed by adapted operations from
    now on, which add nothing where no row has an adapter."""

    def __init__(self, decoder: NamedProducts, dtype: torch.dtype, max_loras: int, max_rank: int) -> None:
        self._decoder, self._dtype, self._max_rank = decoder, dtype, max_rank
        self._named = decoder.named_modules()
        ops = decoder.ops
        self._matrices = [
            _named_matrix(name, each, ops, max_loras, max_rank) for name, each in self._named.products.items()
        ]
        products = {id(matrix.packed): matrix.products for matrix in self._matrices}
        beside = [id(self._named.products[name].packed) for name in self._named.beside]
        self._ops = AdaptedOps(ops, products, {}, beside=beside)
        decoder.multiply_by(cast(Ops, self._ops))

    @property
    def device(self) -> torch.device:
        """See `AdaptedModel.device`."""
        return self._decoder.device

    def read(self, name: ModelName, folder: Path) -> LoraAdapter:
        """See `AdaptedModel.read`."""
        return read_adapter(name, folder, self._named, self._max_rank)

    def load(self, slot: int, adapter: LoraAdapter) -> None:
        """See `AdaptedModel.load`."""
        for matrix in self._matrices:
            matrix.load(slot, adapter, lambda weight: weight.to(self.device, self._dtype).contiguous())

    def in_one_call(self, adapter: LoraAdapter) -> bool:
        """See `AdaptedModel.in_one_call`."""
        return False

    def added(self, batch: LoraBatch) -> NativeAdded:
        """See `AdaptedModel.added`."""
        raise NotImplementedError

    def clear(self, slot: int) -> None:
        """See `AdaptedModel.clear`."""
        for matrix in self._matrices:
            matrix.products.clear(slot)

    def forward(
        self, batch: LoraBatch, ids: Tensor, meta: BatchMeta, caches: KvCaches, features: Tensor | None
    ) -> Tensor | None:
        """See `AdaptedModel.forward`."""
        self._ops.batch = batch
        try:
            return self._decoder.forward(ids, meta, caches, features)
        finally:
            self._ops.batch = None


def _named_matrix(name: str, product: NamedProduct, ops: Ops, slots: int, max_rank: int) -> AdaptedMatrix:
    rows, (first, end) = product.rows, product.columns
    outputs = len(rows) if isinstance(rows, Tensor) else rows[1] - rows[0]
    shape = LowRankShape(slots, max_rank, end - first, (outputs,))
    projection = Projection(0, name, product.columns, rows, outputs)
    return AdaptedMatrix(product.packed, (projection,), ops.low_rank_products(shape))
