"""The adapters of one rank: all that are registered in main memory, and a few of them, the last used, on the device."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.models.config import ModelConfig, ModelError
from services.worker.models.decoder import CausalLm, Decoder
from services.worker.models.lora.adapted_matrices import adapted_matrices, rank_rows
from services.worker.models.lora.adapted_ops import AdaptedOps, EmbeddingProduct, LoraBatch
from services.worker.models.lora.adapter_files import CONFIG, LoraAdapter, read_adapter
from services.worker.models.native_decoder import NativeAdapters
from services.worker.models.weights import KvCaches
from services.worker.ops.interface import AdapterRows, AdapterSpan, BatchMeta, Ops
from services.worker.ops.transfer import to_device
from shared.ids import LoraId, ModelName
from shared.messages.lifecycle import LoraCard
from shared.models.lora_registry import MAX_REGISTERED_LORAS, AdapterRefused

NO_ADAPTER = -1


class LoraSettings(NamedTuple):
    """Which adapters are served, and how many of them at the same time."""

    folders: tuple[tuple[ModelName, Path], ...] = ()
    """Each adapter's name, and where it lies."""
    max_loras: int = 8
    max_rank: int = 16
    at_run_time: bool = False
    """Whether more may come once it serves."""


NO_LORAS = LoraSettings()


class LoraSlots:
    """Owns the registered adapters and the slots of the device. Used from the thread that computes, but for `add` and
    `remove`; what these change the others read in one go."""

    def __init__(self, decoder: Decoder, config: ModelConfig, dtype: torch.dtype, settings: LoraSettings) -> None:
        """Reads all adapters. Raises ModelError where one cannot be served."""
        self._decoder, self._config, self._dtype = decoder, config, dtype
        self._max_loras, self._max_rank = settings.max_loras, settings.max_rank
        adapters = _read_all(settings, config)
        self._matrices = adapted_matrices(decoder, config, settings.max_loras, settings.max_rank)
        self._embeddings: dict[int, EmbeddingProduct] = {}
        """By slot."""
        products = {id(matrix.packed): matrix.products for matrix in self._matrices}
        self._ops = AdaptedOps(decoder.ops, products, self._embeddings)
        self._native = None if decoder.native is None else NativeAdapters(decoder.weights, products)
        self._adapted = decoder.on(cast(Ops, self._ops))
        self._cards: dict[ModelName, LoraCard] = {}
        """Those that are served, by name; several names may have one adapter."""
        self._adapters: dict[int, LoraAdapter] = {}
        """By number; of those that are served no longer, too, while sequences may have them."""
        self._next = 0
        self._changing = threading.Lock()
        """Held while something is served, or freed: an adapter may be loaded again as it is being forgotten."""
        self.numbers: dict[LoraId, int] = {}
        """Which number sequences of an adapter have here."""
        self._slots: OrderedDict[int, int] = OrderedDict()
        """The slots of the adapters on the device, by their numbers; those used last at the end."""
        self._free = list(reversed(range(settings.max_loras)))
        self._embedding_memory = self._reserve_embeddings()
        for adapter in adapters:
            self._serve(adapter)

    @property
    def cards(self) -> tuple[LoraCard, ...]:
        """What the other services know of the adapters."""
        return tuple(self._cards.values())

    @property
    def max_loras(self) -> int:
        """How many different adapters a step may have."""
        return self._max_loras

    @property
    def loaded(self) -> list[LoraId]:
        """The adapters on the device, those used last at the end."""
        return [self._adapters[number].id for number in self._slots]

    def add(self, name: ModelName, folder: Path) -> LoraCard:
        """See `AdapterStore.add`."""
        if name in self._cards:
            raise AdapterRefused(f"lora_name = {name}: there is an adapter of this name")
        if len(self._cards) >= MAX_REGISTERED_LORAS:
            raise AdapterRefused(f"lora_name = {name}: at most {MAX_REGISTERED_LORAS} adapters are allowed")
        folder = folder.expanduser()
        try:
            return self._serve(read_adapter(name, folder, self._config, self._max_rank))
        except ModelError as error:
            raise AdapterRefused(str(error), missing=not (folder / CONFIG).is_file()) from None

    def remove(self, name: ModelName) -> None:
        """See `AdapterStore.remove`."""
        self._cards.pop(name, None)

    def forget_unserved(self, loras: Sequence[LoraId] | None = None) -> None:
        """Frees what is served no longer: of `loras`, or None: all of it. No sequence has any."""
        with self._changing:
            served = {card.id for card in tuple(self._cards.values())}
            for lora in [each for each in (tuple(self.numbers) if loras is None else loras) if each not in served]:
                number = self.numbers.pop(lora, None)
                if number is not None:
                    self._leave_slot(number)
                    del self._adapters[number]

    def _serve(self, adapter: LoraAdapter) -> LoraCard:
        with self._changing:
            if adapter.id not in self.numbers:
                self._adapters[self._next] = adapter
                self.numbers[adapter.id] = self._next
                self._next += 1
            card = self._cards[adapter.name] = LoraCard(name=adapter.name, id=adapter.id, rank=adapter.rank)
            return card

    def batch(self, numbers: NDArray[np.int32], logits_rows: NDArray[np.int32]) -> LoraBatch | None:
        """Whose adapters the rows of a step have, all of them on the device then. `numbers` [n]: of each row's adapter,
        NO_ADAPTER for the base model; `logits_rows` [R]. None where no row has one.

        Raises ValueError where they are more than fit on the device."""
        wanted = [int(number) for number in np.unique(numbers) if number != NO_ADAPTER]
        if not wanted:
            return None
        if len(wanted) > self._max_loras:
            raise ValueError(f"a step has {len(wanted)} adapters; max_loras is {self._max_loras}")
        for number in wanted:
            if number in self._slots:
                self._slots.move_to_end(number)
        for number in wanted:
            if number not in self._slots:
                self._load(number, wanted)
        return LoraBatch(self._rows(numbers), self._rows(numbers[logits_rows]))

    def forward(
        self, batch: LoraBatch, ids: Tensor, meta: BatchMeta, caches: KvCaches, features: Tensor | None = None
    ) -> Tensor | None:
        """See `Decoder.forward`, with the adapters of `batch`."""
        native = self._decoder.native
        if native is not None and self._native is not None and not self._adapts_embedding(batch):
            adapters = self._native.of(batch.all.slots, batch.drawn.slots)
            return native.forward(ids, meta, caches, features, adapters=adapters)
        self._ops.batch = batch
        return self._adapted.forward(ids, meta, caches, features)

    def _rows(self, numbers: NDArray[np.int32]) -> AdapterRows:
        slots = np.full(len(numbers), NO_ADAPTER, dtype=np.int32)
        for number, slot in self._slots.items():
            slots[numbers == number] = slot
        order = np.argsort(slots, kind="stable").astype(np.int32)
        order = order[np.searchsorted(slots[order], 0) :]
        found, counts = np.unique(slots[order], return_counts=True)
        ends = np.cumsum(counts)
        spans = tuple(map(AdapterSpan, found.tolist(), (ends - counts).tolist(), ends.tolist()))
        device = self._decoder.device
        return AdapterRows(to_device(slots, device), to_device(order, device), spans)

    def _adapts_embedding(self, batch: LoraBatch) -> bool:
        return any(span.slot in self._embeddings for span in batch.all.spans)

    # ---- slots

    def _load(self, number: int, wanted: Sequence[int]) -> None:
        """To the device, in place of the one that was not used for longest where all slots are taken."""
        if not self._free:
            self._leave_slot(next(each for each in self._slots if each not in wanted))
        slot = self._slots[number] = self._free.pop()
        adapter = self._adapters[number]
        for matrix in self._matrices:
            matrix.load(slot, adapter, self._on_device)
        if self._decoder.weights.embedding is not None and adapter.embedding is not None:
            a, b = adapter.embedding
            share = self._decoder.share
            words = self._on_device(rank_rows(a.T, share.vocab, share.padded_vocab))
            if self._embedding_memory is not None:
                words = self._embedding_memory[slot, : words.numel()].view(words.shape).copy_(words)
            self._embeddings[slot] = EmbeddingProduct(words, self._decoder.ops.pack_linear(self._on_device(b), None))

    def _reserve_embeddings(self) -> Tensor | None:
        """[slots, words times ranks] of a GPU: it is taken before KV memory is sized, which takes the rest."""
        if (
            self._decoder.device.type == "cpu"
            or self._decoder.weights.embedding is None
            or self._config.tied_embeddings
        ):
            return None
        words = self._decoder.share.padded_vocab * self._max_rank
        return torch.empty(self._max_loras, words, dtype=self._dtype, device=self._decoder.device)

    def _leave_slot(self, number: int) -> None:
        slot = self._slots.pop(number, None)
        if slot is not None:
            self._free.append(slot)
            self._embeddings.pop(slot, None)
            for matrix in self._matrices:
                matrix.products.clear(slot)

    def _on_device(self, weight: Tensor) -> Tensor:
        """Contiguous, in the model's type."""
        return weight.to(self._decoder.device, self._dtype).contiguous()


def open_loras(
    decoder: CausalLm, config: object, dtype: torch.dtype, settings: LoraSettings, name: ModelName
) -> LoraSlots | None:
    """The adapters of `settings` beside the model `name`; None where there can be none. Raises ModelError."""
    if not (settings.folders or settings.at_run_time):
        return None
    if not isinstance(decoder, Decoder) or not isinstance(config, ModelConfig):
        raise ModelError("lora: a model that transformers computes can have no adapters here")
    if config.latent is not None:
        raise ModelError(f"lora: adapters of {config.architecture} are not supported: its attention is latent")
    if config.plugin is not None:
        raise ModelError(f"lora: a model of {config.plugin} can have no adapters")
    if any(each == name for each, _ in settings.folders):
        raise ModelError(f"lora = {name}: the model itself has this name")
    return LoraSlots(decoder, config, dtype, settings)


def _read_all(settings: LoraSettings, config: ModelConfig) -> list[LoraAdapter]:
    if len(settings.folders) > MAX_REGISTERED_LORAS:
        raise ModelError(f"lora: {len(settings.folders)} adapters; at most {MAX_REGISTERED_LORAS} are allowed")
    names = [name for name, _ in settings.folders]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ModelError(f"lora = {twice}: this name is given twice")
    return [read_adapter(name, folder.expanduser(), config, settings.max_rank) for name, folder in settings.folders]
