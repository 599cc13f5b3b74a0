"""Operations that add low-rank products to those of a base model's matrices: adapters of many requests in one batch.

They stand before the device's own operations, so that a decoder is the same with adapters as without. Each adapter's
rows are multiplied by themselves, on the device's own matrix products: where those are batch invariant, a row's result
does not depend on whose adapters the other rows of the batch have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from services.worker.ops.interface import (
    Activation,
    BatchMeta,
    DraftAttempt,
    LatentOps,
    Ops,
    PackedExperts,
    PackedLinear,
    Routing,
)
from services.worker.ops.quantized import QuantizedWeight

if TYPE_CHECKING:
    from services.worker.kv.copier import KvCopier


class LowRankProduct(NamedTuple):
    """What is added to one matrix's products; `b` has the adapter's scale."""

    a: PackedLinear
    """[rank, in], those of fused matrices one below the other."""
    b: PackedLinear
    """[out, rank], those of fused matrices along the diagonal."""


class EmbeddingProduct(NamedTuple):
    """What is added to rows of the embedding."""

    a: Tensor
    """[words, rank]"""
    b: PackedLinear
    """[hidden, rank]"""


class LoraWeights(NamedTuple):
    """One rank's share of an adapter, on its device."""

    products: Mapping[int, LowRankProduct]
    """By the `id` of the base model's packed matrix."""
    embedding: EmbeddingProduct | None


class LoraGroup(NamedTuple):
    """Rows of a batch that have the same adapter."""

    weights: LoraWeights
    rows: Tensor | slice
    """Their numbers, int64 on the device; or a slice, where they follow each other."""


class LoraBatch(NamedTuple):
    """Whose adapters the rows of one step have; rows of the base model are in no group."""

    rows: int
    """n"""
    all: tuple[LoraGroup, ...]
    """Of the n rows."""
    drawn: tuple[LoraGroup, ...]
    """Of the rows whose logits are wanted, numbered among these."""

    def of(self, rows: int) -> tuple[LoraGroup, ...]:
        """The groups of a tensor of so many rows: all of them, or those whose logits are wanted."""
        return self.all if rows == self.rows else self.drawn


class AdaptedOps:
    """See the module and :class:`services.worker.ops.interface.Ops`, which it delegates to. `batch` is set before each
    forward pass by whoever runs it."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.batch = LoraBatch(0, (), ())

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """The base model's product, and those of the rows' adapters."""
        product = self._ops.linear(x, packed)
        for group in self.batch.of(len(x)):
            added = group.weights.products.get(id(packed))
            if added is not None:
                self._add(product, group.rows, self._ops.linear(_picked(x, group.rows), added.a), added.b)
        return product

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """Rows of the table, and what the rows' adapters add to them."""
        product = self._ops.embed(ids, table)
        for group in self.batch.of(len(ids)):
            added = group.weights.embedding
            if added is not None:
                self._add(product, group.rows, added.a.index_select(0, _picked(ids, group.rows)), added.b)
        return product

    def _add(self, product: Tensor, rows: Tensor | slice, low: Tensor, b: PackedLinear) -> None:
        high = self._ops.linear(low, b).to(product.dtype)
        if isinstance(rows, slice):
            product[rows].add_(high)
        else:
            product.index_add_(0, rows, high)

    # ---- as the device does it

    @property
    def name(self) -> str:
        """That of the device's operations."""
        return self._ops.name

    @property
    def block_size(self) -> int:
        """Tokens of a block of keys and values."""
        return self._ops.block_size

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """As the device packs it."""
        return self._ops.pack_linear(weight, bias)

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None) -> PackedLinear:
        """As the device packs it."""
        return self._ops.pack_quantized(weight, bias)

    def empty_rows(self, rows: int, hidden: int) -> Tensor:
        """As the device's."""
        return self._ops.empty_rows(rows, hidden)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As the device computes it."""
        return self._ops.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """As the device computes it."""
        return self._ops.add_rms_norm(x, residual, weight, eps)

    def gated_act(self, gate_up: Tensor, kind: Activation) -> Tensor:
        """As the device computes it."""
        return self._ops.gated_act(gate_up, kind)

    def pack_experts(self, gate_up: Tensor, down: Tensor) -> PackedExperts:
        """As the device packs them."""
        return self._ops.pack_experts(gate_up, down)

    def mixture(
        self, x: Tensor, logits: Tensor, experts: PackedExperts, *, routing: Routing, kind: Activation
    ) -> Tensor:
        """As the device computes it: experts have no adapters."""
        return self._ops.mixture(x, logits, experts, routing=routing, kind=kind)

    def kv_block_bytes(self, kv_heads: int, head_dim: int) -> int:
        """As the device's."""
        return self._ops.kv_block_bytes(kv_heads, head_dim)

    def allocate_kv(self, num_blocks: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """As the device's."""
        return self._ops.allocate_kv(num_blocks, kv_heads, head_dim)

    def kv_copier(self, caches: list[tuple[Tensor, Tensor]], head_dim: int) -> KvCopier:
        """As the device's."""
        return self._ops.kv_copier(caches, head_dim)

    def rope_and_store(
        self,
        qkv: Tensor,
        meta: BatchMeta,
        cos_sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """As the device computes it."""
        return self._ops.rope_and_store(
            qkv, meta, cos_sin, k_cache, v_cache, heads=heads, q_norm=q_norm, k_norm=k_norm, eps=eps
        )

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: BatchMeta,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        """As the device computes it."""
        return self._ops.paged_attention(
            *(q, k_cache, v_cache, meta),
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
        )

    @property
    def latents(self) -> LatentOps:
        """The device's."""
        return self._ops.latents

    def verify(self, attempt: DraftAttempt) -> Tensor:
        """As the device does."""
        return self._ops.verify(attempt)


def _picked(x: Tensor, rows: Tensor | slice) -> Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)
