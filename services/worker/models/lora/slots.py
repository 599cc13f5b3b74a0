"""The adapters of one rank: all that are registered in main memory, and a few of them, the last used, on the device."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.models.config import ModelConfig, ModelError
from services.worker.models.decoder import Decoder
from services.worker.models.loaded_model import CausalLm
from services.worker.models.lora.adapted_models import (
    AdaptedDecoder,
    AdaptedLibraryModel,
    AdaptedModel,
    NamedProducts,
    NativeAdded,
)
from services.worker.models.lora.adapted_ops import LoraBatch
from services.worker.models.lora.adapter_files import CONFIG, LoraAdapter
from services.worker.models.weights import KvCaches
from services.worker.ops.interface import BatchMeta
from services.worker.ops.low_rank import AdapterRows, AdapterSpan
from services.worker.ops.transfer import to_device
from shared.ids import LoraId, ModelName
from shared.machine.home import NoHome, expanded
from shared.messages.model_card import LoraCard
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

    def __init__(self, model: AdaptedModel, settings: LoraSettings) -> None:
        """Reads all adapters. Raises ModelError where one cannot be served."""
        self._model = model
        self._max_loras = settings.max_loras
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
        for name, folder in settings.folders:
            self._serve(model.read(name, expanded(folder)))

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
        try:
            folder = expanded(folder)
        except NoHome as error:
            raise AdapterRefused(f"lora_path = {error}", missing=True) from None
        try:
            return self._serve(self._model.read(name, folder))
        except ModelError as error:
            raise AdapterRefused(str(error), missing=not os.path.isfile(folder / CONFIG)) from None

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

    def batch(
        self,
        numbers: NDArray[np.int32],
        logits_rows: NDArray[np.int32],
        beside: NDArray[np.int32] | None = None,
    ) -> LoraBatch | None:
        """Whose adapters the rows of a step have, all of them on the device then. `numbers` [n]: of each row's adapter,
        NO_ADAPTER for the base model; `logits_rows` [R]; `beside` [k]: as `numbers`, of the rows beside prompts that it
        reads, which belong to the same sequences. None where no row has one.

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
        read = None if beside is None or not len(beside) else self._rows(beside)
        return LoraBatch(self._rows(numbers), self._rows(numbers[logits_rows]), read)

    def in_one_call(self, numbers: NDArray[np.int32]) -> bool:
        """Whether decodes of sequences with these adapters ([W], as `batch` has them) are one call of the native
        library. On any thread."""
        return all(self._model.in_one_call(self._adapters[n]) for n in set(numbers.tolist()) if n != NO_ADAPTER)

    def added(self, numbers: NDArray[np.int32]) -> NativeAdded:
        """What such a call adds to the products of rows with these adapters [n], of which some are one; see `batch`."""
        batch = self.batch(numbers, np.arange(len(numbers), dtype=np.int32))
        assert batch is not None, "the caller has looked"
        return self._model.added(batch)

    def forward(
        self, batch: LoraBatch, ids: Tensor, meta: BatchMeta, caches: KvCaches, features: Tensor | None = None
    ) -> Tensor | None:
        """See `Decoder.forward`, with the adapters of `batch`."""
        return self._model.forward(batch, ids, meta, caches, features)

    def _rows(self, numbers: NDArray[np.int32]) -> AdapterRows:
        slots = np.full(len(numbers), NO_ADAPTER, dtype=np.int32)
        for number, slot in self._slots.items():
            slots[numbers == number] = slot
        order = np.argsort(slots, kind="stable").astype(np.int32)
        order = order[np.searchsorted(slots[order], 0) :]
        found, counts = np.unique(slots[order], return_counts=True)
        ends = np.cumsum(counts)
        spans = tuple(map(AdapterSpan, found.tolist(), (ends - counts).tolist(), ends.tolist()))
        device = self._model.device
        return AdapterRows(to_device(slots, device), to_device(order, device), spans)

    # ---- slots

    def _load(self, number: int, wanted: Sequence[int]) -> None:
        """To the device, in place of the one that was not used for longest where all slots are taken."""
        if not self._free:
            self._leave_slot(next(each for each in self._slots if each not in wanted))
        slot = self._slots[number] = self._free.pop()
        self._model.load(slot, self._adapters[number])

    def _leave_slot(self, number: int) -> None:
        slot = self._slots.pop(number, None)
        if slot is not None:
            self._free.append(slot)
            self._model.clear(slot)


def open_loras(
    decoder: CausalLm, config: object, dtype: torch.dtype, settings: LoraSettings, name: ModelName
) -> LoraSlots | None:
    """The adapters of `settings` beside the model `name`; None where there can be none. Raises ModelError."""
    if not (settings.folders or settings.at_run_time):
        return None
    _check_names(settings, name)
    how = (dtype, settings.max_loras, settings.max_rank)
    if isinstance(decoder, Decoder) and isinstance(config, ModelConfig):
        if config.plugin is not None:
            raise ModelError(f"lora: a model of {config.plugin} can have no adapters")
        return LoraSlots(AdaptedDecoder(decoder, config, *how), settings)
    if isinstance(decoder, NamedProducts):
        return LoraSlots(AdaptedLibraryModel(decoder, *how), settings)
    raise ModelError("lora: an encoder can have no adapters")


def _check_names(settings: LoraSettings, model: ModelName) -> None:
    if len(settings.folders) > MAX_REGISTERED_LORAS:
        raise ModelError(f"lora: {len(settings.folders)} adapters; at most {MAX_REGISTERED_LORAS} are allowed")
    names = [name for name, _ in settings.folders]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ModelError(f"lora = {twice}: this name is given twice")
    if model in names:
        raise ModelError(f"lora = {model}: the model itself has this name")
