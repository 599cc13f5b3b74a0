"""Attention over the paged cache in portable PyTorch.

Decodes attend together: one gather of whole blocks, then two batched products. (Measured against SDPA over the same
gather, 1.4 times as slow, and against SDPA for each sequence, 2.6 times as slow, for 64 sequences of 256 tokens.)
Prefills attend one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.ops.interface import BatchMeta

_MAX_SCORES = 1 << 21
"""Scores that a chunk of a prefill computes at once: 8 MiB."""


_MIN_CHUNK = 16
"""Rows of such a chunk, however long the context is."""


_MAX_GATHERED = 1 << 24
"""Elements of keys that decodes gather at once: 32 MiB in half precision."""


class PagedAttentionStep(NamedTuple):
    """One layer's attention in one step; every method gives parts of [rows, H * D], in the order of the rows."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    meta: BatchMeta
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    distance_biases: Tensor | None = None

    def decodes(self) -> Iterator[Tensor]:
        """Yields the decode outputs of as many sequences at once as their gathered keys may take memory."""
        most = self.meta.max_context
        _, kv_heads, _, head_dim = self.k_cache.shape
        step = max(1, _MAX_GATHERED // (kv_heads * head_dim * most))
        for first in range(0, self.meta.num_decodes, step):
            rows = slice(first, min(first + step, self.meta.num_decodes))
            keys, values = self._gather(rows, most)
            ahead = _ahead(self.meta.positions[rows].unsqueeze(1), keys.shape[2])
            yield self._attend(self.q[rows].unsqueeze(2), keys, values, ahead.unsqueeze(1))

    def prefills(self) -> Iterator[Tensor]:
        """One sequence after the other."""
        start = self.meta.num_decodes
        for sequence, (rows, context) in enumerate(self.meta.prefills, start=start):
            keys, values = self._gather(slice(sequence, sequence + 1), context)
            queries = self.q[start : start + rows].transpose(0, 1).unsqueeze(0)
            lasts = None if self.meta.lasts is None else self.meta.lasts[start : start + rows]
            yield from self._chunks(queries, keys, values, context, lasts)
            start += rows

    def _chunks(self, q: Tensor, keys: Tensor, values: Tensor, context: int, lasts: Tensor | None) -> Iterator[Tensor]:
        """q [1, H, rows, D], the last rows of a sequence of `context` tokens; lasts [rows].

        Chunks bound the memory that scores take, and leave out the keys that no row of the chunk sees.
        """
        heads, rows = q.shape[1:3]
        step = max(_MIN_CHUNK, _MAX_SCORES // (heads * context))
        for first in range(0, rows, step):
            last = min(first + step, rows)
            position, newest = context - rows + first, context - rows + last
            oldest = 0 if self.window is None else max(0, position - self.window + 1)
            positions = torch.arange(position, newest, dtype=torch.int32, device=q.device).unsqueeze(1)
            beyond: Tensor | int = 0
            if lasts is not None:
                newest, beyond = int(lasts[last - 1]) + 1, lasts[first:last].unsqueeze(1) - positions
            ahead = _ahead(positions - oldest, newest - oldest).unsqueeze(0)
            part = slice(oldest, newest)
            yield self._attend(q[:, :, first:last], keys[:, :, part], values[:, :, part], ahead, beyond)

    def _gather(self, sequences: slice, most: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the sequences' first `most` tokens (rounded up to blocks): [S, KV, tokens, D]."""
        num_blocks, kv_heads, block_size, head_dim = self.k_cache.shape
        width = -(-most // block_size)
        tables = self.meta.block_tables[sequences, :width]
        heads = torch.arange(kv_heads, dtype=torch.int32, device=tables.device)
        rows = (tables[:, None, :] * kv_heads + heads[None, :, None]).reshape(-1)

        def gathered(cache: Tensor) -> Tensor:
            blocks = cache.view(num_blocks * kv_heads, block_size * head_dim).index_select(0, rows)
            return blocks.view(len(tables), kv_heads, width * block_size, head_dim)

        return gathered(self.k_cache), gathered(self.v_cache)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, ahead: Tensor, beyond: Tensor | int = 0) -> Tensor:
        """q [S, H, rows, D], keys and values [S, KV, tokens, D], ahead [S, rows, tokens] → [S * rows, H * D]. `beyond`
        [rows, 1]: how many tokens ahead of itself a row sees."""
        sequences, heads, rows, head_dim = q.shape
        kv_heads = keys.shape[1]
        grouped = q.reshape(sequences, kv_heads, heads // kv_heads * rows, head_dim)
        scores = torch.matmul(grouped, keys.transpose(2, 3)).float()
        scores *= self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.view(sequences, heads, rows, -1)
        ahead = ahead.unsqueeze(1)
        if self.alibi_slopes is not None:
            scores += self.alibi_slopes.view(-1, 1, 1) * ahead
        if self.distance_biases is not None:
            distances = (-ahead).clamp(0, self.distance_biases.shape[1] - 1).squeeze(1)
            scores += self.distance_biases[:, distances.long()].transpose(0, 1)
        unseen = ahead > beyond if self.window is None else (ahead > beyond) | (ahead <= -self.window)
        scores = scores.masked_fill_(unseen, float("-inf"))
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.view(-1, 1, 1).expand(sequences, heads, rows, 1)), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : keys.shape[2]].to(values.dtype)
        weights = weights.reshape(sequences, kv_heads, -1, keys.shape[2])
        mixed = torch.matmul(weights, values).view(sequences, heads, rows, head_dim)
        return mixed.transpose(1, 2).reshape(sequences * rows, heads * head_dim)


def _ahead(positions: Tensor, tokens: int) -> Tensor:
    """positions [..., rows, 1] → int32 [..., rows, tokens]: how far each token is ahead of that row; it sees those that
    are at 0 and below."""
    return torch.arange(tokens, dtype=torch.int32, device=positions.device) - positions
