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
    sinks: Tensor | None = None
    """float32 [H]: see `Ops.paged_attention`."""

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
        parts = [first_rows(cache, self.meta, sequences, most) for cache in (self.cache.latents, self.cache.rotated)]
        return torch.cat(parts, dim=-1)

    def attend_to(self, chosen: Tensor, unseen: Tensor | None = None) -> Iterator[Tensor]:
        """The same of some rows at a time, each of which attends to those tokens alone; `chosen`: see
        `LatentOps.choose`. `unseen` [n, count]: which of them it does not; None: those behind its position."""
        count = chosen.shape[1]
        step = max(1, _MAX_GATHERED // (self.q.shape[2] * count))
        tokens = torch.arange(count, dtype=torch.int32, device=chosen.device)
        for rows in (slice(first, first + step) for first in range(0, len(self.q), step)):
            slots = chosen[rows].flatten()
            parts = [cache.flatten(0, 2).index_select(0, slots) for cache in (self.cache.latents, self.cache.rotated)]
            keys = torch.cat(parts, dim=-1).view(-1, count, self.q.shape[2])
            hidden = tokens > self.meta.positions[rows].unsqueeze(1) if unseen is None else unseen[rows]
            yield self._attend(self.q[rows], keys, hidden.unsqueeze(1))

    def _attend(self, q: Tensor, keys: Tensor, unseen: Tensor) -> Tensor:
        """q [S, rows of heads, D], keys [S, tokens, D], unseen [S, 1 or rows of heads, tokens] → [S, rows, rank]."""
        scores = torch.matmul(q.to(keys.dtype), keys.transpose(1, 2)).float()
        scores = scores.mul_(self.scale).masked_fill_(unseen, float("-inf"))
        if self.sinks is not None:
            sinks = self.sinks.repeat(q.shape[1] // len(self.sinks)).view(1, -1, 1).expand(len(q), -1, -1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : keys.shape[1]].to(keys.dtype)
        return torch.matmul(weights, keys[:, :, : self.cache.latents.shape[3]])


def latent_attention(q: Tensor, cache: LatentCache, meta: BatchMeta, scale: float) -> Tensor:
    """See `LatentOps.attention`: decodes together, prefills one after the other; scores in float32."""
    step = LatentAttentionStep(q, cache, meta, scale)
    parts = [*step.decodes(), *step.prefills()]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def sunk_attention(
    q: Tensor, cache: LatentCache, meta: BatchMeta, scale: float, sinks: Tensor, chosen: Tensor | None
) -> Tensor:
    """See `LatentOps.attention`, with a sink of each head [H]."""
    step = LatentAttentionStep(q, cache, meta, scale, sinks)
    return torch.cat([*step.attend_to(chosen)] if chosen is not None else [*step.decodes(), *step.prefills()])


def store_latents(latents: Tensor, rotated: Tensor, meta: BatchMeta, cache: LatentCache) -> None:
    """latents [n, rank] and rotated [n, rope_dim] to `meta.slots`, in the cache's dtype."""
    store_rows(latents, meta, cache.latents)
    store_rows(rotated, meta, cache.rotated)


def store_rows(rows: Tensor, meta: BatchMeta, cache: Tensor) -> None:
    """rows [n, D] to `meta.slots` of [blocks, 1, block_size, D], in its dtype."""
    block_size = cache.shape[2]
    block = torch.div(meta.slots, block_size, rounding_mode="floor")
    cache[block, 0, meta.slots - block * block_size] = rows.to(cache.dtype)


def chosen_attention(q: Tensor, cache: LatentCache, meta: BatchMeta, chosen: Tensor, scale: float) -> Tensor:
    """See `LatentOps.attention`: of tokens that are chosen."""
    parts = [*LatentAttentionStep(q, cache, meta, scale).attend_to(chosen)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class IndexStep(NamedTuple):
    """What one layer's indexer scores in one step; see `LatentOps.choose`."""

    q: Tensor
    """[n, heads, dim], rotated."""
    weights: Tensor
    """float32 [n, heads]"""
    cache: LatentCache
    meta: BatchMeta

    def pieces(self) -> Iterator[tuple[slice, slice, int]]:
        """(rows, sequences, the tokens of the longest): as many decodes at once as take little memory, then all rows of
        each prefill."""
        meta, (_, heads, dim) = self.meta, self.q.shape
        decodes, longest = meta.num_decodes, meta.max_context
        step = max(1, min(_MAX_GATHERED // (dim * longest), _MAX_SCORES // (heads * longest)))
        for first in range(0, decodes, step):
            rows = slice(first, min(first + step, decodes))
            yield rows, rows, longest
        start = decodes
        for sequence, (rows_of_it, context) in enumerate(meta.prefills, start=decodes):
            yield slice(start, start + rows_of_it), slice(sequence, sequence + 1), context
            start += rows_of_it

    def parts(self, rows: slice, keys: Tensor) -> Iterator[slice]:
        """Of a piece, and `keys` [S, count, dim] of its sequences, as many rows at a time as take little memory."""
        most = rows.stop - rows.start
        if len(keys) == 1:
            most = max(1, _MAX_SCORES // max(1, self.q.shape[1] * keys.shape[1]))
        for first in range(rows.start, rows.stop, most):
            yield slice(first, min(first + most, rows.stop))

    def scores(self, rows: slice, keys: Tensor) -> Tensor:
        """keys [S, count, dim] of S sequences, to which the rows belong in turn, or all to one → [rows, count]."""
        q, weights = self.q[rows].to(keys.dtype), self.weights[rows]
        scores = torch.matmul(q.view(len(keys), -1, q.shape[2]), keys.transpose(1, 2)).float().relu_()
        return torch.matmul(weights.unsqueeze(1), scores.view(*q.shape[:2], -1)).squeeze(1)

    def score(self, rows: slice, keys: Tensor) -> Tensor:
        """The same of tokens; -inf where a row does not see."""
        scores = self.scores(rows, keys)
        tokens = torch.arange(keys.shape[1], dtype=torch.int32, device=keys.device)
        return scores.masked_fill_(tokens > self.meta.positions[rows].unsqueeze(1), float("-inf"))


def choose_tokens(step: IndexStep, count: int) -> Tensor:
    """See `LatentOps.choose`: decodes together, prefills one after the other; as many rows at a time as take little
    memory."""
    meta, cache = step.meta, step.cache.index_keys
    assert cache is not None, "there are an indexer's keys"
    parts = []
    for rows, sequences, tokens in step.pieces():
        keys, tables = first_rows(cache, meta, sequences, tokens), meta.block_tables[sequences].long()
        for part in step.parts(rows, keys):
            positions = best_tokens(step.score(part, keys), count)
            blocks = tables.expand(len(positions), -1).gather(1, positions // cache.shape[2])
            parts.append(blocks * cache.shape[2] + positions % cache.shape[2])
    return torch.cat(parts)


def best_tokens(scores: Tensor, count: int) -> Tensor:
    """scores [rows, tokens] → the places of the `count` greatest in rising order, int64 [rows, count]; of equal ones
    the first are taken, and what is no number is the least. Behind those of fewer tokens there are zeros."""
    rows, tokens = scores.shape
    scores = scores.masked_fill(scores.isnan(), float("-inf"))
    taken = min(count, tokens)
    least = scores.topk(taken, dim=1).values[:, -1:]
    better, equal = scores > least, scores == least
    chosen = better | (equal & (equal.cumsum(1) <= taken - better.sum(1, keepdim=True)))
    places = chosen.nonzero()[:, 1].view(rows, taken)
    return torch.cat((places, places.new_zeros(rows, count - taken)), dim=1) if taken < count else places


def first_rows(cache: Tensor, meta: BatchMeta, sequences: slice, most: int) -> Tensor:
    """Of a layer's cache the rows of the sequences' first `most` tokens (rounded up to blocks), [S, tokens, D]."""
    tables = meta.block_tables[sequences, : -(-most // cache.shape[2])]
    return cache.index_select(0, tables.reshape(-1)).flatten(1, 2).view(len(tables), -1, cache.shape[3])
