"""Which of a decoder's matrices adapters change, and one rank's share of what an adapter adds to each: columns and rows
as those of the matrix itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder
from services.worker.models.lora.adapted_modules import modules_of_layer
from services.worker.models.lora.adapter_files import HEAD, LoraAdapter, LoraPair
from services.worker.models.weights import Rows
from services.worker.ops.interface import PackedLinear
from services.worker.ops.low_rank import LowRankPart, LowRankProducts, LowRankShape


class Projection(NamedTuple):
    """One rank's share of a module that adapters name."""

    layer: int
    module: str
    columns: tuple[int, int]
    """Its inputs here, from and to."""
    rows: Rows
    """Its outputs here."""
    padded: int
    """Outputs with those that are there only so that every rank has as many."""

    def of(self, adapter: LoraAdapter) -> LoraPair | None:
        """The module's pair, whole; None where the adapter leaves it as it is."""
        return adapter.head if self.module == HEAD else adapter.layers.get((self.layer, self.module))


class AdaptedMatrix(NamedTuple):
    """One matrix, of one projection or several below each other, and what adapters add to its products."""

    packed: PackedLinear
    projections: tuple[Projection, ...]
    products: LowRankProducts

    def load(self, slot: int, adapter: LoraAdapter, on_device: Callable[[Tensor], Tensor]) -> None:
        """What `adapter` adds, to a slot of the device."""
        parts = []
        for projection in self.projections:
            pair = projection.of(adapter)
            part = None
            if pair is not None:
                first, end = projection.columns
                rows = rank_rows(pair.b, projection.rows, projection.padded)
                part = LowRankPart(on_device(pair.a[:, first:end]), on_device(rows))
            parts.append(part)
        self.products.put(slot, parts)


def adapted_matrices(decoder: Decoder, config: ModelConfig, slots: int, max_rank: int) -> list[AdaptedMatrix]:
    """Those of one rank, with memory for so many adapters where the device's operations take it at once."""
    weights, share, found = decoder.weights, decoder.share, list[AdaptedMatrix]()

    def add(packed: PackedLinear, *projections: Projection) -> None:
        first, end = projections[0].columns
        shape = LowRankShape(slots, max_rank, end - first, tuple(each.padded for each in projections))
        found.append(AdaptedMatrix(packed, projections, decoder.ops.low_rank_products(shape)))

    for number, layer in enumerate(weights.layers, weights.first_layer):
        for packed, columns, parts in modules_of_layer(config, share, number, layer):
            add(packed, *(Projection(number, each.module, columns, each.rows, each.outputs) for each in parts))
    if weights.head is not None and not config.tied_embeddings:
        add(weights.head, Projection(0, HEAD, (0, config.hidden_size), share.vocab, share.padded_vocab))
    return found


def rank_rows(table: Tensor, rows: Rows, padded: int) -> Tensor:
    """One rank's rows, padded with zeros to as many as every rank has."""
    own = table[rows if isinstance(rows, Tensor) else slice(*rows)].float()
    return torch.cat((own, own.new_zeros(padded - len(own), own.shape[1]))) if padded > len(own) else own
