"""Blocks between all layers' caches and a stage by PyTorch: what `kernels.kv_blocks` does where Triton can be had."""

from __future__ import annotations

import torch
from torch import Tensor


class TorchBlocks:
    """Caches as `kernels.kv_blocks.BlockCaches` takes them. Launches for the keys and for the values of each layer."""

    def __init__(self, caches: list[tuple[Tensor, Tensor]]) -> None:
        self._caches = [[cache.flatten(2).view(torch.int32) for cache in halves] for halves in caches]
        """Each [blocks, heads, words of 16 tokens]. What is only copied may be taken for numbers."""

    def gather(self, blocks: Tensor, staged: Tensor) -> None:
        """staged [n, heads, layers, 2, words] = the caches' `blocks` (int32 [n])."""
        for layer, halves in enumerate(self._caches):
            for half, cache in enumerate(halves):
                staged[:, :, layer, half] = cache.index_select(0, blocks)

    def scatter(self, blocks: Tensor, staged: Tensor) -> None:
        """The caches' `blocks`, each named once = staged."""
        where = blocks.long()
        for layer, halves in enumerate(self._caches):
            for half, cache in enumerate(halves):
                cache.index_copy_(0, where, staged[:, :, layer, half])
