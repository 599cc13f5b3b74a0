"""Operations that add low-rank products to those of a base model's matrices: adapters of many requests in one batch.

They stand before the device's own operations, so that a decoder is the same with adapters as without. What is adapted
is overridden here; all else is the device's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from services.worker.models.lora.adapted_latents import AdaptedLatentOps, LatentProducts
from services.worker.ops.interface import (
    Activation,
    EmbeddingTable,
    Ops,
    PackedLinear,
)
from services.worker.ops.low_rank import AdapterRows, LowRankProducts


class EmbeddingProduct(NamedTuple):
    """What is added to rows of the embedding."""

    a: Tensor
    """[words, rank]"""
    b: PackedLinear
    """[hidden, rank]"""


class LoraBatch(NamedTuple):
    """Whose adapters the rows of one step have."""

    all: AdapterRows
    """Of the n rows."""
    drawn: AdapterRows
    """Of the rows whose logits are wanted, numbered among these."""
    beside: AdapterRows | None = None
    """Of the rows beside prompts whose keys and values the step makes; None: there are none."""

    def of(self, rows: int) -> AdapterRows:
        """Of a tensor of so many rows: all of them, or those whose logits are wanted. Raises ValueError for others."""
        for each in (self.all, self.drawn):
            if rows == len(each.slots):
                return each
        raise ValueError(f"{rows} rows are neither all nor those whose logits are wanted")


class AdaptedOps:
    """See the module and :class:`services.worker.ops.interface.Ops`. `batch` is set before each forward pass by whoever
    runs it; None: no row has an adapter."""

    batch: LoraBatch | None = None

    def __init__(
        self,
        ops: Ops,
        products: Mapping[int, LowRankProducts],
        embeddings: Mapping[int, EmbeddingProduct],
        latents: LatentProducts | None = None,
        beside: Collection[int] = (),
    ) -> None:
        """`products`: by the `id` of the matrix beside which they are, as it is packed. `embeddings`: by slot.
        `latents`: of a model whose attention is latent. `beside`: matrices that rows beside prompts are multiplied
        with."""
        self._beside = frozenset(beside)
        self._ops, self._products, self._embeddings = ops, products, embeddings
        if latents is not None:
            self.latents = AdaptedLatentOps(ops.latents, latents, self.rows)

    def rows(self, count: int) -> AdapterRows | None:
        """Whose adapters so many rows have; None: nobody's."""
        return None if self.batch is None else self.batch.of(count)

    def __getattr__(self, name: str) -> Any:
        """As the device does it."""
        return getattr(self._ops, name)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """The base model's product, and those of the rows' adapters."""
        product = self._ops.linear(x, packed)
        added = self._products.get(id(packed))
        if added is None or self.batch is None:
            return product
        rows = self.batch.beside if id(packed) in self._beside else self.batch.of(len(x))
        if rows is not None and rows.spans:
            added.add(product, x, rows)
        return product

    def gated_linear(self, x: Tensor, packed: PackedLinear, kind: Activation) -> Tensor:
        """Adapters add to gates and ups before they are activated."""
        if self.batch is None or id(packed) not in self._products:
            gated: Tensor = self._ops.gated_linear(x, packed, kind)
            return gated
        return self._ops.gated_act(self.linear(x, packed), kind)

    @property
    def embeds_codes(self) -> bool:
        """See `Ops.embeds_codes`."""
        return self._ops.embeds_codes

    def embed(self, ids: Tensor, table: EmbeddingTable) -> Tensor:
        """Rows of the table, and what the rows' adapters add to them."""
        product = self._ops.embed(ids, table)
        rows = None if self.batch is None else self.batch.of(len(ids))
        for slot, first, end in () if rows is None else rows.spans:
            added = self._embeddings.get(slot)
            if rows is not None and added is not None:
                chosen = rows.order[first:end]
                low = added.a.index_select(0, ids.index_select(0, chosen))
                product.index_add_(0, chosen, self._ops.linear(low, added.b).to(product.dtype))
        return product
