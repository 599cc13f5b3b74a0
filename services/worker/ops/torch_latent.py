"""Latent attention over the paged cache in portable PyTorch: one head of keys that all queries read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.ops.interface import BatchMeta, LatentCache

_MAX_SCORES = 1 << 21
"""Scores that a chunk of a prefill computes at once: 8 MiB."""
_MIN_CHUNK = 16
_MAX_GATHERED = 1 << 24
"""Elements of latents that decodes gather at once: 32 MiB in half precision."""


class LatentAttentionStep(NamedTuple):
    """One layer's attention in one step; every method gives parts of [rows, H, rank], in the order of the rows."""

    q: Tensor
    """[n, H, rank + rope_dim]"""
    cache: LatentCache
    meta: BatchMeta
    scale: float

    def decodes(self) -> Iterator[Tensor]:
        """Yields the outputs of as many sequences at once as their gathered latents may take memory."""
        most = self.meta.max_context
        step = max(1, _MAX_GATHERED // (self.q.shape[2] * most))
        for first in range(0, self.meta.num_decodes, step):
            rows = slice(first, min(first + step, self.meta.num_decodes))
            keys = self._gather(rows, most)
            tokens = torch.arange(keys.shape[1], dtype=torch.int32, device=keys.device)
            unseen = tokens > self.meta.positions[rows].unsqueeze(1)
            yield self._attend(self.q[rows], keys, unseen.unsqueeze(1))

    def prefills(self) -> Iterator[Tensor]:
        """One sequence after the other, some of its rows at a time: scores take memory."""
        start, heads = self.meta.num_decodes, self.q.shape[1]
        for sequence, (rows, context) in enumerate(self.meta.prefills, start=start):
            keys = self._gather(slice(sequence, sequence + 1), context)
            step = max(_MIN_CHUNK, _MAX_SCORES // (heads * context))
            for first in range(0, rows, step):
                count, seen = min(step, rows - first), context - rows + first
                tokens = torch.arange(seen + count, dtype=torch.int32, device=keys.device)
                positions = seen + torch.arange(count, dtype=torch.int32, device=keys.device)
                unseen = (tokens > positions.unsqueeze(1)).repeat_interleave(heads, dim=0)
                part = self.q[start + first : start + first + count].reshape(1, count * heads, -1)
                made = self._attend(part, keys[:, : seen + count], unseen.unsqueeze(0))
                yield made.view(count, heads, -1)
            start += rows

    def _gather(self, sequences: slice, most: int) -> Tensor:
        """Latents and rotated keys of the sequences' first `most` tokens (rounded up to blocks): [S, tokens, D]."""
        block_size = self.cache.latents.shape[2]
        tables = self.meta.block_tables[sequences, : -(-most // block_size)]
        parts = [cache.index_select(0, tables.reshape(-1)).flatten(1, 2) for cache in self.cache]
        return torch.cat(parts, dim=-1).view(len(tables), -1, self.q.shape[2])

    def _attend(self, q: Tensor, keys: Tensor, unseen: Tensor) -> Tensor:
        """q [S, rows of heads, D], keys [S, tokens, D], unseen [S, 1 or rows of heads, tokens] → [S, rows, rank]."""
        scores = torch.matmul(q.to(keys.dtype), keys.transpose(1, 2)).float()
        scores = scores.mul_(self.scale).masked_fill_(unseen, float("-inf"))
        weights = torch.softmax(scores, dim=-1).to(keys.dtype)
        return torch.matmul(weights, keys[:, :, : self.cache.latents.shape[3]])


def latent_attention(q: Tensor, cache: LatentCache, meta: BatchMeta, scale: float) -> Tensor:
    """See `LatentOps.attention`: decodes together, prefills one after the other; scores in float32."""
    step = LatentAttentionStep(q, cache, meta, scale)
    parts = [*step.decodes(), *step.prefills()]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def store_latents(latents: Tensor, rotated: Tensor, meta: BatchMeta, cache: LatentCache) -> None:
    """latents [n, rank] and rotated [n, rope_dim] to `meta.slots`, in the cache's dtype."""
    block_size = cache.latents.shape[2]
    block = torch.div(meta.slots, block_size, rounding_mode="floor")
    offset = meta.slots - block * block_size
    cache.latents[block, 0, offset] = latents.to(cache.latents.dtype)
    cache.rotated[block, 0, offset] = rotated.to(cache.rotated.dtype)
