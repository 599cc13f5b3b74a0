"""What adapters add to the products that latent attention has in place of those which make keys and values of latents.

An adapter of `kv_b_proj` adds b · (a · latent) to the keys and values of all heads. Of a head's keys, b's rows are
multiplied with the query, and what that gives with a, transposed; of its values, a with what attention made of latents,
and that with b's rows. So neither keys nor values are made here, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder
from services.worker.models.hf_layers.latent import LatentConfig
from services.worker.models.lora.adapted_modules import KEYS_AND_VALUES
from services.worker.models.lora.adapter_files import LoraAdapter, LoraPair
from services.worker.ops.interface import Ops, PackedHeads, PackedLinear
from services.worker.ops.low_rank import AdapterRows


class _KeyProduct(NamedTuple):
    """Behind each other, of one adapter and one layer: [H, rank, nope_dim] and [kv_rank, rank]."""

    first: PackedHeads
    second: PackedLinear

    def of(self, ops: Ops, x: Tensor) -> Tensor:
        """x [m, H, nope_dim] → [m, H, kv_rank]."""
        low = ops.latents.linear_of_heads(x, self.first)
        return ops.linear(low.flatten(0, 1).contiguous(), self.second).view(*x.shape[:2], -1)


class _ValueProduct(NamedTuple):
    """Behind each other, of one adapter and one layer: [rank, kv_rank] and [H, value_dim, rank]."""

    first: PackedLinear
    second: PackedHeads

    def of(self, ops: Ops, x: Tensor) -> Tensor:
        """x [m, H, kv_rank] → [m, H, value_dim]."""
        low = ops.linear(x.flatten(0, 1).contiguous(), self.first).view(*x.shape[:2], -1)
        return ops.latents.linear_of_heads(low.contiguous(), self.second)


class LatentProducts:
    """Owns what the adapters on the device add to the products of one rank's heads."""

    def __init__(self, decoder: Decoder, latent: LatentConfig) -> None:
        self._latent, self._ops, self._share = latent, decoder.ops, decoder.share
        weights = decoder.weights
        self._layers = {
            number: layer.latent
            for number, layer in enumerate(weights.layers, weights.first_layer)
            if layer.latent is not None
        }
        self._products: dict[tuple[int, int], _KeyProduct | _ValueProduct] = {}
        """By the `id` of the matrices beside which they are, and slot."""

    def load(self, slot: int, adapter: LoraAdapter, on_device: Callable[[Tensor], Tensor]) -> None:
        """What `adapter` adds, to a slot of the device."""
        for number, weights in self._layers.items():
            pair = adapter.layers.get((number, KEYS_AND_VALUES))
            if pair is not None:
                keys, values = self._of_pair(self._latent.of_layer(number), pair, on_device)
                self._products[id(weights.keys_up), slot] = keys
                self._products[id(weights.values_up), slot] = values

    def clear(self, slot: int) -> None:
        """Frees the slot."""
        for key in [key for key in self._products if key[1] == slot]:
            del self._products[key]

    def add(self, product: Tensor, x: Tensor, packed: PackedHeads, rows: AdapterRows) -> None:
        """To `product`, which `packed` makes of x [n, H, …]."""
        for slot, first, end in rows.spans:
            added = self._products.get((id(packed), slot))
            if added is not None:
                chosen = rows.order[first:end]
                own = added.of(self._ops, x.index_select(0, chosen))
                product.index_add_(0, chosen, own.to(product.dtype))

    def _of_pair(
        self, latent: LatentConfig, pair: LoraPair, on_device: Callable[[Tensor], Tensor]
    ) -> tuple[_KeyProduct, _ValueProduct]:
        (first, end), ops = self._share.heads, self._ops
        each = latent.nope_dim + latent.value_dim
        by_head = pair.b[first * each : end * each].view(end - first, each, -1)
        keys, values = torch.split(by_head, [latent.nope_dim, latent.value_dim], dim=1)
        heads = (ops.latents.pack_heads(on_device(part)) for part in (keys.transpose(1, 2), values))
        keys_first, values_second = heads
        return (
            _KeyProduct(keys_first, ops.pack_linear(on_device(pair.a.T), None)),
            _ValueProduct(ops.pack_linear(on_device(pair.a), None), values_second),
        )


class AdaptedLatentOps:
    """Operations on latents with what adapters add; see `AdaptedOps`, before which it stands."""

    def __init__(self, latents: Any, products: LatentProducts, rows: Callable[[int], AdapterRows | None]) -> None:
        """`rows`: whose adapters so many rows have; None: nobody's."""
        self._latents, self._products, self._rows = latents, products, rows

    def __getattr__(self, name: str) -> Any:
        """As the device does it."""
        return getattr(self._latents, name)

    def linear_of_heads(self, x: Tensor, packed: PackedHeads) -> Tensor:
        """The base model's products, and those of the rows' adapters."""
        product: Tensor = self._latents.linear_of_heads(x, packed)
        rows = self._rows(len(x))
        if rows is not None:
            self._products.add(product, x, packed, rows)
        return product


def latent_products(decoder: Decoder, config: ModelConfig) -> LatentProducts | None:
    """None where attention is not latent."""
    return None if config.latent is None else LatentProducts(decoder, config.latent)
