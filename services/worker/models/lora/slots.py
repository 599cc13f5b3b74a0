"""The adapters of one rank: all that are registered in main memory, and a few of them, the last used, on the device."""

from __future__ import annotations

import math
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
from services.worker.models.decoder import CausalLm, Decoder
from services.worker.models.lora.adapted_ops import (
    AdaptedOps,
    EmbeddingProduct,
    LoraBatch,
    LoraGroup,
    LoraWeights,
    LowRankProduct,
)
from services.worker.models.lora.adapter_files import CONFIG, LoraAdapter, LoraPair, read_adapter
from services.worker.models.sharding import LayerShard
from services.worker.models.weights import DenseMlp, KvCaches, LayerWeights
from services.worker.ops.interface import BatchMeta, PackedLinear
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
        self._ops = AdaptedOps(decoder.ops)
        self._adapted = decoder.on(self._ops)
        self._cards: dict[ModelName, LoraCard] = {}
        """Those that are served, by name; several names may have one adapter."""
        self._adapters: dict[int, LoraAdapter] = {}
        """By number; of those that are served no longer, too, while sequences may have them."""
        self._next = 0
        self._changing = threading.Lock()
        """Held while something is served, or freed: an adapter may be loaded again as it is being forgotten."""
        self.numbers: dict[LoraId, int] = {}
        """Which number sequences of an adapter have here."""
        for adapter in _read_all(settings, config):
            self._serve(adapter)
        self._slots: OrderedDict[int, LoraWeights] = OrderedDict()
        """The adapters on the device by number, those used last at the end."""
        self._memory = _slot_memory(decoder, config, dtype, settings)
        self._memory_of: dict[int, Tensor] = {}

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
        weights = {number: self._slots.get(number) or self._load(number, wanted) for number in wanted}
        return LoraBatch(len(numbers), self._groups(weights, numbers), self._groups(weights, numbers[logits_rows]))

    def forward(
        self, batch: LoraBatch, ids: Tensor, meta: BatchMeta, caches: KvCaches, features: Tensor | None = None
    ) -> Tensor | None:
        """See `Decoder.forward`, with the adapters of `batch`."""
        self._ops.batch = batch
        return self._adapted.forward(ids, meta, caches, features)

    def _groups(self, weights: dict[int, LoraWeights], numbers: NDArray[np.int32]) -> tuple[LoraGroup, ...]:
        groups = []
        for number, of in weights.items():
            rows = np.flatnonzero(numbers == number)
            if not len(rows):
                continue
            first, last = int(rows[0]), int(rows[-1])
            follow = last - first + 1 == len(rows)
            device = self._decoder.device
            groups.append(LoraGroup(of, slice(first, last + 1) if follow else to_device(rows, device)))
        return tuple(groups)

    # ---- slots

    def _load(self, number: int, wanted: Sequence[int]) -> LoraWeights:
        """To the device, in place of the one that was not used for longest where all slots are taken."""
        if len(self._slots) == self._max_loras:
            self._leave_slot(next(each for each in self._slots if each not in wanted))
        place = None
        if self._memory_of or self._memory:
            place = self._memory_of[number] = self._memory.pop()
        self._slots[number] = weights = _Placing(self._decoder, self._config, self._dtype, place).weights(
            self._adapters[number]
        )
        return weights

    def _leave_slot(self, number: int) -> None:
        self._slots.pop(number, None)
        place = self._memory_of.pop(number, None)
        if place is not None:
            self._memory.append(place)


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


class _Placing:
    """Puts one rank's share of an adapter on its device: columns and rows as those of the base model's matrices."""

    def __init__(self, decoder: Decoder, config: ModelConfig, dtype: torch.dtype, place: Tensor | None) -> None:
        """`place`: memory of the device for it, flat; None: wherever there is some."""
        self._decoder, self._config, self._dtype, self._place = decoder, config, dtype, place
        self._used = 0

    def weights(self, adapter: LoraAdapter) -> LoraWeights:
        """The adapter's products of this rank's layers."""
        weights, share = self._decoder.weights, self._decoder.share
        products: dict[int, LowRankProduct] = {}
        for number, layer in enumerate(weights.layers):
            for packed, product in self._layer(adapter, weights.first_layer + number, layer, share):
                products[id(packed)] = product
        if weights.head is not None and adapter.head is not None:
            rows = _rows(adapter.head.b, share.vocab, share.padded_vocab)
            products[id(weights.head)] = LowRankProduct(self._pack(adapter.head.a), self._pack(rows))
        embedding = None
        if weights.embedding is not None and adapter.embedding is not None:
            words = _rows(adapter.embedding.a.T, share.vocab, share.padded_vocab)
            embedding = EmbeddingProduct(self._put(words), self._pack(adapter.embedding.b))
        return LoraWeights(products, embedding)

    def _layer(
        self, adapter: LoraAdapter, number: int, layer: LayerWeights, share: LayerShard
    ) -> list[tuple[PackedLinear, LowRankProduct]]:
        dim = self._config.head_dim
        heads, kv = ((first * dim, end * dim) for first, end in (share.heads, share.kv_heads))

        def pair(module: str) -> LoraPair | None:
            return adapter.layers.get((number, module))

        attention = [("q", heads), ("k", kv), ("v", kv)]
        fused = [(layer.qkv, [(pair(f"self_attn.{part}_proj"), rows) for part, rows in attention])]
        single = [(layer.output, pair("self_attn.o_proj"), heads)]
        if isinstance(layer.mlp, DenseMlp):
            fused.append((layer.mlp.gate_up, [(pair(f"mlp.{part}_proj"), share.mlp) for part in ("gate", "up")]))
            single.append((layer.mlp.down, pair("mlp.down_proj"), share.mlp))
        found = [(packed, self._fused(parts)) for packed, parts in fused if any(each for each, _ in parts)]
        for packed, each, (first, end) in single:
            if each is not None:
                found.append((packed, LowRankProduct(self._pack(each.a[:, first:end]), self._pack(each.b))))
        return found

    def _fused(self, parts: list[tuple[LoraPair | None, tuple[int, int]]]) -> LowRankProduct:
        """Of a matrix that several projections are one below the other in; `parts`: each one's rows of this rank."""
        below = torch.cat([pair.a.float() for pair, _ in parts if pair is not None])
        diagonal = torch.zeros(sum(end - first for _, (first, end) in parts), len(below))
        row = column = 0
        for pair, (first, end) in parts:
            if pair is not None:
                rank = len(pair.a)
                diagonal[row : row + end - first, column : column + rank] = pair.b[first:end]
                column += rank
            row += end - first
        return LowRankProduct(self._pack(below), self._pack(diagonal))

    def _pack(self, weight: Tensor) -> PackedLinear:
        return self._decoder.ops.pack_linear(self._put(weight), None)

    def _put(self, weight: Tensor) -> Tensor:
        """Contiguous on the device, in the model's type."""
        if self._place is None:
            return weight.to(self._decoder.device, self._dtype).contiguous()
        put = self._place[self._used : self._used + weight.numel()].view(weight.shape)
        self._used += -(-weight.numel() // _ALIGNED) * _ALIGNED
        return put.copy_(weight)


_ALIGNED = 64
"""Numbers that the start of a matrix is a multiple of, in a slot's memory."""


def _rows(table: Tensor, rows: tuple[int, int], padded: int) -> Tensor:
    """This rank's rows, padded with zeros to as many as every rank has."""
    own = table[rows[0] : rows[1]].float()
    return torch.cat((own, own.new_zeros(padded - len(own), own.shape[1]))) if padded > len(own) else own


def _slot_memory(decoder: Decoder, config: ModelConfig, dtype: torch.dtype, settings: LoraSettings) -> list[Tensor]:
    """Memory for each slot, for an adapter of all modules and the highest rank: on a GPU it is taken before KV memory
    is sized, which takes the rest. None on a CPU, where a slot takes what its adapter needs."""
    if decoder.device.type == "cpu":
        return []
    share, hidden, rank = decoder.share, config.hidden_size, settings.max_rank
    heads = (share.heads[1] - share.heads[0]) * config.head_dim
    kv = (share.kv_heads[1] - share.kv_heads[0]) * config.head_dim
    mlp = share.mlp[1] - share.mlp[0]
    shapes = [(3 * rank, hidden), (heads + 2 * kv, 3 * rank), (rank, heads), (hidden, rank)]
    shapes += [(2 * rank, hidden), (2 * mlp, 2 * rank), (rank, mlp), (hidden, rank)]
    shapes *= len(decoder.weights.layers)
    shapes += 2 * [(share.padded_vocab, rank), (hidden, rank)]
    numbers = sum(-(-math.prod(shape) // _ALIGNED) * _ALIGNED for shape in shapes)
    return [torch.empty(numbers, dtype=dtype, device=decoder.device) for _ in range(settings.max_loras)]
