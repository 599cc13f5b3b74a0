"""Latent attention with the C++ library's matrices; see :class:`services.worker.ops.interface.LatentOps`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from services.worker.kv.plain_copier import PlainKvCopier
from services.worker.ops.interface import BatchMeta, LatentCache, PackedHeads
from services.worker.ops.native.kernels import zeroed
from services.worker.ops.native.matrix_stacks import MatrixStack, multiply_each, pack_stack
from services.worker.ops.torch_latent import latent_attention, store_latents
from services.worker.ops.torch_ops import rotate

if TYPE_CHECKING:
    from services.worker.ops.native.native_ops import NativeOps


class NativeLatents:
    """Beside `ops`, on their threads."""

    def __init__(self, ops: NativeOps) -> None:
        self._ops = ops

    def pack_heads(self, weight: Tensor) -> PackedHeads:
        """Each head's matrix in the library's layout."""
        return PackedHeads(pack_stack(self._ops, weight))

    def linear_of_heads(self, x: Tensor, packed: PackedHeads) -> Tensor:
        """float32; a row's result does not depend on the others."""
        assert isinstance(packed, MatrixStack)
        rows, heads, inputs = x.shape
        starts = torch.arange(heads + 1, dtype=torch.int64) * rows
        by_head = x.transpose(0, 1).reshape(heads * rows, inputs)
        made = multiply_each(self._ops, by_head, packed, starts, None)
        return made.view(heads, rows, packed.out).transpose(0, 1).contiguous()

    def block_bytes(self, rank: int, rope_dim: int) -> int:
        """Latents are kept in the weights' type."""
        return self._ops.block_size * (rank + rope_dim) * self._ops.dtype.itemsize

    def allocate(self, num_blocks: int, rank: int, rope_dim: int) -> tuple[Tensor, Tensor]:
        """As the interface says, nothing rearranged."""
        latents, rotated = (
            zeroed(num_blocks * self._ops.block_size * dim * self._ops.dtype.itemsize)
            .view(self._ops.dtype)
            .view(num_blocks, 1, self._ops.block_size, dim)
            for dim in (rank, rope_dim)
        )
        return latents, rotated

    def copier(self, caches: list[tuple[Tensor, Tensor]]) -> PlainKvCopier:
        """Plain copies, on the thread that asks."""
        return PlainKvCopier(caches)

    def rope_and_store(
        self,
        q: Tensor,
        latents: Tensor,
        meta: BatchMeta,
        cos_sin: Tensor,
        cache: LatentCache,
        *,
        norm: Tensor,
        eps: float,
    ) -> Tensor:
        """Row by row, rotated in float32."""
        rank, rope_dim = len(norm), cos_sin.shape[1]
        rows = cos_sin.index_select(0, meta.positions).unsqueeze(1)
        normed = self._ops.rms_norm(latents[:, :rank].contiguous(), norm, eps)
        store_latents(normed, rotate(latents[:, rank:].unsqueeze(1), rows).squeeze(1), meta, cache)
        q[:, :, -rope_dim:] = rotate(q[:, :, -rope_dim:], rows)
        return q

    def attention(self, q: Tensor, cache: LatentCache, meta: BatchMeta, *, scale: float) -> Tensor:
        """In the weights' type."""
        return latent_attention(q, cache, meta, scale)
