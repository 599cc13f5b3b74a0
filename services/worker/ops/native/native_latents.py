"""Latent attention by the C++ library; see :class:`services.worker.ops.interface.LatentOps`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from services.worker.kv.plain_copier import PlainKvCopier
from services.worker.ops.interface import BatchMeta, LatentCache, PackedHeads
from services.worker.ops.native import library
from services.worker.ops.native.kernels import zeroed
from services.worker.ops.native.matrix_stacks import MatrixStack, multiply_each, pack_stack

if TYPE_CHECKING:
    from services.worker.ops.native.native_ops import NativeOps


MAX_HEAD_DIM = 1024
"""`kMostDim` of rope.cpp."""


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
        made = multiply_each(self._ops, by_head, packed, starts)
        return made.view(heads, rows, packed.out).transpose(0, 1).contiguous()

    def block_bytes(self, rank: int, rope_dim: int) -> int:
        """Latents are kept in the weights' type."""
        return self._ops.block_size * (rank + rope_dim) * self._ops.dtype.itemsize

    def allocate(self, num_blocks: int, rank: int, rope_dim: int) -> tuple[Tensor, Tensor]:
        """As the interface says, nothing rearranged."""
        latents, rotated = (
            zeroed(num_blocks * self._ops.block_size * dim * self._ops.dtype.itemsize, grows=True)
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
        """Queries in float32. Raises ValueError for rotated keys that the library does not know."""
        if cos_sin.shape[1] > MAX_HEAD_DIM:
            raise ValueError(f"rotated keys of {cos_sin.shape[1]} elements are not supported")
        q, latents = q.float().contiguous(), latents.float().contiguous()
        what = library.StoreLatents(
            *(latents.data_ptr(), q.data_ptr(), q.shape[1], q.shape[2], cos_sin.data_ptr(), norm.data_ptr(), eps)
        )
        self._call(self._ops.kernels.library.baton_store_latents, what, meta, cache)
        return q

    def attention(self, q: Tensor, cache: LatentCache, meta: BatchMeta, *, scale: float) -> Tensor:
        """In float32; a row's result does not depend on the others."""
        q = q.float().contiguous()
        rows, heads, _ = q.shape
        to = torch.empty(rows, heads, cache.latents.shape[3])
        what = library.NativeLatentAttention(q.data_ptr(), heads, scale, to.data_ptr())
        self._call(self._ops.kernels.library.baton_attend_latents, what, meta, cache)
        return to

    def _call(self, function: Callable[..., None], what: ctypes.Structure, meta: BatchMeta, cache: LatentCache) -> None:
        """`function` with one layer's cache."""
        latents, rotated = cache
        given = library.NativeLatentCache(
            *(self._ops.number, latents.data_ptr(), rotated.data_ptr(), latents.shape[3], rotated.shape[3]),
            library.page_bits(latents.shape[2]),
        )
        batch = self._ops.batch_of(meta)
        function(self._ops.kernels.pool, ctypes.byref(what), ctypes.byref(batch), ctypes.byref(given))
