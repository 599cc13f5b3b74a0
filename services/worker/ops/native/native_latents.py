"""Latent attention by the C++ library; see :class:`services.worker.ops.interface.LatentOps`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.kv.plain_copier import PlainKvCopier
from services.worker.ops.interface import BatchMeta, LatentCache, PackedHeads
from services.worker.ops.native import library
from services.worker.ops.native.kernels import zeroed
from services.worker.ops.native.library import PAGE_TOKENS
from services.worker.ops.native.matrix_stacks import MatrixStack, multiply_each, pack_stack
from services.worker.ops.torch_latent import IndexStep, choose_tokens
from services.worker.ops.torch_ops import rotate_last

if TYPE_CHECKING:
    from services.worker.ops.native.native_ops import NativeOps


_MAX_GATHERED = 1 << 24
"""Elements of chosen latents that are gathered at once: 32 MiB in half precision."""
MAX_HEAD_DIM = 1024
"""`kMaxHeadDim` of rope.cpp."""


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

    def block_bytes(self, rank: int, beside: int) -> int:
        """Latents are kept in the weights' type."""
        return self._ops.block_size * (rank + beside) * self._ops.dtype.itemsize

    def allocate(self, num_blocks: int, rank: int, beside: int) -> tuple[Tensor, Tensor]:
        """As the interface says, nothing rearranged."""
        latents, keys = (
            zeroed(num_blocks * self._ops.block_size * dim * self._ops.dtype.itemsize, grows=True)
            .view(self._ops.dtype)
            .view(num_blocks, 1, self._ops.block_size, dim)
            for dim in (rank, beside)
        )
        return latents, keys

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

    def choose(
        self, q: Tensor, weights: Tensor, meta: BatchMeta, cos_sin: Tensor, cache: LatentCache, count: int
    ) -> Tensor:
        """By PyTorch."""
        rows = cos_sin.index_select(0, meta.positions).unsqueeze(1)
        return choose_tokens(IndexStep(rotate_last(q, rows), weights, cache, meta), count)

    def attention(
        self, q: Tensor, cache: LatentCache, meta: BatchMeta, *, scale: float, chosen: Tensor | None = None
    ) -> Tensor:
        """In float32; a row's result does not depend on the others."""
        q = q.float().contiguous()
        rows, heads, _ = q.shape
        to = torch.empty(rows, heads, cache.latents.shape[3])
        if chosen is not None:
            for first in range(0, rows, step := max(1, _MAX_GATHERED // (chosen.shape[1] * q.shape[2]))):
                some = slice(first, first + step)
                gathered, own = _gathered(cache, chosen[some], meta.positions[some])
                what = library.NativeLatentAttention(q[some].data_ptr(), heads, scale, to[some].data_ptr())
                self._call(self._ops.kernels.library.baton_attend_latents, what, own, gathered)
            return to
        what = library.NativeLatentAttention(q.data_ptr(), heads, scale, to.data_ptr())
        self._call(self._ops.kernels.library.baton_attend_latents, what, meta, cache)
        return to

    def _call(self, function: Callable[..., None], what: ctypes.Structure, meta: BatchMeta, cache: LatentCache) -> None:
        """`function` with one layer's cache."""
        latents, rotated, index = cache
        given = library.NativeLatentCache(
            *(self._ops.number, latents.data_ptr(), rotated.data_ptr(), latents.shape[3], rotated.shape[3]),
            0 if index is None else index.shape[3],
            library.page_bits(latents.shape[2]),
        )
        batch = self._ops.batch_of(meta)
        function(self._ops.kernels.pool, ctypes.byref(what), ctypes.byref(batch), ctypes.byref(given))


def _gathered(cache: LatentCache, chosen: Tensor, positions: Tensor) -> tuple[LatentCache, BatchMeta]:
    """A cache of what is chosen for some rows, as if each were a sequence of that, and a step that decodes them."""
    rows, count = chosen.shape
    blocks = -(-count // PAGE_TOKENS)
    slots = F.pad(chosen, (0, blocks * PAGE_TOKENS - count)).flatten()
    latents, rotated = (
        each.flatten(0, 2).index_select(0, slots).view(rows * blocks, 1, PAGE_TOKENS, -1)
        for each in (cache.latents, cache.rotated)
    )
    lasts = positions.clamp_max(count - 1)
    step = BatchMeta(
        query_starts=torch.arange(rows + 1, dtype=torch.int32),
        context_lens=lasts + 1,
        block_tables=torch.arange(rows * blocks, dtype=torch.int32).view(rows, blocks),
        slots=torch.zeros(rows, dtype=torch.int32),
        positions=lasts,
        logits_rows=torch.empty(0, dtype=torch.int32),
        num_decodes=rows,
        prefills=(),
        max_query=1,
        max_context=count,
        block_size=PAGE_TOKENS,
    )
    return LatentCache(latents, rotated), step
