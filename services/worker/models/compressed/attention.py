"""Attention over the last tokens and over entries that are made of those before (DeepSeek-V4, section 2.3), of one
rank's heads, by PyTorch's operations.

All heads read one key, which is their value, too. What has been rotated for the one is rotated back in the output by
the query's position, so that a value counts by its distance.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.models.compressed.cache import EntryCache, RowCache
from services.worker.models.config import CompressedConfig, Compression, ModelConfig
from services.worker.models.weights import CompressedWeights, CompressorWeights, EntryWeights, LayerWeights
from services.worker.ops.interface import Ops
from services.worker.ops.torch_latent import best_tokens

_MAX_SCORES = 1 << 21
"""Scores that a chunk of rows computes at once: 8 MiB."""
_MIN_CHUNK = 16
_FEW = 4
"""Up to so many times as many entries as are chosen, rows of a prompt attend to all together, with those masked that
are not; beyond, each gathers its own, which takes less time then."""
_MAX_GATHERED = 1 << 24
"""Elements of keys that decodes gather at once."""


class LayerStep(NamedTuple):
    """One layer in one step."""

    layer: LayerWeights
    kind: Compression | None
    rows: RowCache
    entries: EntryCache | None


class Queries(NamedTuple):
    """What the rows of a step ask for."""

    heads: Tensor
    """[n, H, D], rotated."""
    index_q: Tensor | None
    """[n, heads, dim] of the indexer, rotated; None: all entries are attended to."""
    counts: Tensor | None
    """float32 [n, heads]: how much each of these counts."""


class CompressedAttention:
    """Knows no weights and no cache: they are given with each call."""

    def __init__(self, config: ModelConfig, ops: Ops, heads: int) -> None:
        """`heads`: of this rank, whole groups."""
        assert config.compressed is not None, "keys are compressed"
        self._sizes, self._ops, self._heads, self._eps = config.compressed, ops, heads, config.norm_eps
        self._scale, self._groups = config.attention_scale, config.compressed.groups * heads // config.num_heads

    def queries(self, step: LayerStep, x: Tensor) -> Queries:
        """x [n, hidden], normed → its queries; the cache has the rows' keys, and the entries that end with them."""
        layer, weights, ops, rank = step.layer, _weights(step.layer), self._ops, self._sizes.q_rank
        cos_sin = layer.cos_sin.index_select(0, step.rows.meta.positions).unsqueeze(1)
        made = ops.linear(x, layer.qkv)
        latent = ops.rms_norm(made[:, :rank].contiguous(), weights.q_norm, self._eps)
        keys = ops.rms_norm(made[:, rank:].contiguous(), weights.key_norm, self._eps)
        step.rows.store(rotate_pairs(keys.unsqueeze(1), cos_sin).squeeze(1), step.rows.keys)
        q = ops.linear(latent, weights.q_up).view(len(x), self._heads, -1).float()
        q = rotate_pairs(q * torch.rsqrt(q.square().mean(-1, keepdim=True) + self._eps), cos_sin)
        if weights.entries is None or step.entries is None or step.kind is None or step.rows.numbers is None:
            return Queries(q, None, None)
        numbers = ops.linear(x, weights.entries.inputs)
        width = step.rows.numbers.shape[2]
        step.rows.store(numbers[:, :width], step.rows.numbers)
        self._end_windows(step, weights.entries, step.kind, step.entries, step.rows.numbers)
        if weights.entries.index_q_up is None:
            return Queries(q, None, None)
        index = ops.linear(latent, weights.entries.index_q_up).view(len(x), self._sizes.index_heads, -1)
        return Queries(q, rotate_pairs(index, cos_sin), numbers[:, width:].float())

    def _end_windows(
        self, step: LayerStep, weights: EntryWeights, kind: Compression, entries: EntryCache, numbers: Tensor
    ) -> None:
        """Makes the entries of the windows that end with rows of this step."""
        meta, dim = step.rows.meta, step.rows.keys.shape[2]
        ending = ((meta.positions + 1) % kind.rate == 0).nonzero().flatten()
        if not len(ending):
            return
        sequences = torch.searchsorted(meta.query_starts, ending, right=True) - 1
        lasts = meta.positions[ending].long().unsqueeze(1)
        positions = lasts + torch.arange(1 - kind.span, 1, device=lasts.device)
        made = step.rows.gather(numbers, meta.block_tables[sequences], positions).float()
        unseen = positions < 0
        cos_sin = step.layer.cos_sin[lasts.squeeze(1) + 1 - kind.rate].unsqueeze(1)
        widths = [dim, dim] if weights.index is None else [2 * dim, 2 * dim] + 2 * [made.shape[2] // 2 - 2 * dim]
        parts = torch.split(made, widths, dim=2)
        found = [self._entry(parts[0], parts[1], unseen, weights.keys, cos_sin)]
        if weights.index is not None:
            found.append(self._entry(parts[2], parts[3], unseen, weights.index, cos_sin))
        block, inside = entries.place(entries.meta.block_tables[sequences], lasts)
        entry = torch.cat(found, dim=1).to(entries.entries.dtype)
        entries.entries[block.squeeze(1), inside.squeeze(1)] = entry

    def _entry(
        self, keys: Tensor, counts: Tensor, unseen: Tensor, weights: CompressorWeights, cos_sin: Tensor
    ) -> Tensor:
        """keys and counts [m, span, width] → the entries, [m, dim]. Of two windows the first one's tokens have the
        first half of `width`, the second one's the other."""
        counts = counts + weights.bias.repeat(counts.shape[1] // len(weights.bias), 1)
        if counts.shape[1] > len(weights.bias):
            keys, counts = (
                torch.cat((each[:, : len(weights.bias)].chunk(2, 2)[0], each[:, len(weights.bias) :].chunk(2, 2)[1]), 1)
                for each in (keys, counts)
            )
        shares = counts.masked_fill(unseen.unsqueeze(2), float("-inf")).softmax(dim=1)
        entry = F.rms_norm((keys * shares).sum(1), weights.norm.shape, weights.norm, self._eps)
        return rotate_pairs(entry.unsqueeze(1), cos_sin).squeeze(1)

    def attend(self, step: LayerStep, queries: Queries) -> Tensor:
        """What `queries` gave → what the last matrix is to multiply, [n, groups * output_rank] of this rank's."""
        attending = _EntryAttention(step, queries, self._scale, self._sizes)
        mixed = torch.cat([*attending.decodes(), *attending.prefills()])
        cos, sin = step.layer.cos_sin.index_select(0, step.rows.meta.positions).unsqueeze(1).chunk(2, dim=2)
        mixed = rotate_pairs(mixed, torch.cat((cos, -sin), dim=2))
        grouped = mixed.view(len(mixed), self._groups, -1)
        return self._ops.latents.linear_of_heads(grouped, _weights(step.layer).grouped).flatten(1)


class _EntryAttention(NamedTuple):
    """One layer's attention in one step; every method gives parts of [rows, H, D], in the order of the rows."""

    step: LayerStep
    queries: Queries
    scale: float
    sizes: CompressedConfig

    def decodes(self) -> Iterator[Tensor]:
        """Yields the outputs of as many sequences at once as what they gather may take memory."""
        meta, window = self.step.rows.meta, self.sizes.window
        ended = 0 if self.step.entries is None else meta.max_context // self.step.entries.rate
        entry_dim = 0 if self.step.entries is None else self.step.entries.entries.shape[2]
        most = max(1, _MAX_GATHERED // (self.step.rows.keys.shape[2] * window + entry_dim * ended))
        for first in range(0, meta.num_decodes, most):
            rows = slice(first, min(first + most, meta.num_decodes))
            positions = meta.positions[rows].long().unsqueeze(1)
            seen = positions + torch.arange(1 - window, 1, device=positions.device)
            keys = self.step.rows.gather(self.step.rows.keys, meta.block_tables[rows], seen)
            unseen = (seen < 0).unsqueeze(1)
            if (found := self._found(rows, ended)) is not None:
                entries, missing = self._entries(rows, found, apart=True)
                keys, unseen = torch.cat((keys, entries), dim=1), torch.cat((unseen, missing), dim=2)
            yield self._mix(self.queries.heads[rows].unsqueeze(1), keys, unseen)

    def prefills(self) -> Iterator[Tensor]:
        """One sequence after the other, some of its rows at a time: scores take memory."""
        meta, window = self.step.rows.meta, self.sizes.window
        start = meta.num_decodes
        for sequence, (rows, context) in enumerate(meta.prefills, start=start):
            tables = meta.block_tables[sequence : sequence + 1]
            ended = 0 if self.step.entries is None else context // self.step.entries.rate
            found = self._found(slice(sequence, sequence + 1), ended)
            step, apart = self._rows_at_once(ended), self._chooses(ended, _FEW)
            for first in range(0, rows, step):
                count, before = min(step, rows - first), context - rows + first
                seen = torch.arange(max(0, before - window + 1), before + count, device=tables.device)
                keys = self.step.rows.gather(self.step.rows.keys, tables, seen.unsqueeze(0))
                ahead = seen - torch.arange(before, before + count, device=tables.device).unsqueeze(1)
                unseen = ((ahead > 0) | (ahead <= -window)).unsqueeze(0)
                chunk = slice(start + first, start + first + count)
                q = self.queries.heads[chunk].unsqueeze(0)
                if apart:  # as sequences of a row
                    q, keys, unseen = q.transpose(0, 1), keys.expand(count, -1, -1), unseen.transpose(0, 1)
                if found is not None:
                    entries, missing = self._entries(chunk, found, apart=apart)
                    keys, unseen = torch.cat((keys, entries), dim=1), torch.cat((unseen, missing), dim=2)
                yield self._mix(q, keys, unseen)
            start += rows

    def _found(self, sequences: slice, ended: int) -> Tensor | None:
        """[S, ended, …]: the first entries of these sequences, by their group's tables; None: there are none."""
        cache = self.step.entries
        return cache.gather(cache.meta.block_tables[sequences], ended) if cache is not None and ended else None

    def _chooses(self, ended: int, times: int = 1) -> bool:
        """Whether there are more than so many `times` as many entries as an indexer chooses."""
        return self.queries.index_q is not None and ended > times * self.sizes.index_chosen

    def _rows_at_once(self, ended: int) -> int:
        """Of a prompt with so many entries, by what their scores take, the indexer's, too."""
        attended = self.sizes.index_chosen if self._chooses(ended, _FEW) else ended
        width = self.sizes.window + _MIN_CHUNK + attended
        rows = max(_MIN_CHUNK, _MAX_SCORES // (self.queries.heads.shape[1] * width))
        if self.queries.index_q is None or not self._chooses(ended):
            return rows
        return min(rows, max(1, _MAX_SCORES // (self.queries.index_q.shape[1] * ended)))

    def _entries(self, rows: slice, found: Tensor, *, apart: bool) -> tuple[Tensor, Tensor]:
        """`found` [S, ended, …]: the entries of S sequences, to which the rows belong in turn, or all to one. Returns
        keys [S, k, D], and which of them a row does not see, [S, rows of a sequence, k]. `apart`: where an indexer
        chooses, each row has keys of its own, as if it were a sequence."""
        cache, meta, ended = self.step.entries, self.step.rows.meta, found.shape[1]
        assert cache is not None
        numbers = torch.arange(ended, device=found.device)
        unseen = numbers >= (meta.positions[rows].unsqueeze(1) + 1) // cache.rate
        dim, chosen = self.queries.heads.shape[2], self.sizes.index_chosen
        keys = found[:, :, :dim]
        if not self._chooses(ended):
            return keys, unseen.view(len(found), -1, ended)
        places = best_tokens(self._scores(rows, found[:, :, dim:]).masked_fill_(unseen, float("-inf")), chosen)
        if not apart:
            return keys, (unseen | torch.ones_like(unseen).scatter_(1, places, False)).unsqueeze(0)
        own = keys.expand(len(places), -1, -1).gather(1, places.unsqueeze(2).expand(-1, -1, dim))
        return own, unseen.gather(1, places).unsqueeze(1)

    def _scores(self, rows: slice, keys: Tensor) -> Tensor:
        """keys [S, k, dim] of the indexer → what they are worth to rows, [rows, k]. What multiplies all is left out."""
        assert self.queries.index_q is not None, "an indexer chooses"
        assert self.queries.counts is not None
        q = self.queries.index_q[rows].to(keys.dtype)
        worth = torch.matmul(q.reshape(len(keys), -1, q.shape[2]), keys.transpose(1, 2)).float().relu_()
        return torch.matmul(self.queries.counts[rows].unsqueeze(1), worth.view(*q.shape[:2], -1)).squeeze(1)

    def _mix(self, q: Tensor, keys: Tensor, unseen: Tensor) -> Tensor:
        """q [S, rows, H, D], keys [S, k, D], unseen [S, rows, k] → [S * rows, H, D]."""
        sequences, rows, heads, dim = q.shape
        scores = torch.matmul(q.flatten(1, 2).to(keys.dtype), keys.transpose(1, 2)).float().mul_(self.scale)
        scores = scores.view(sequences, rows, heads, -1).masked_fill_(unseen.unsqueeze(2), float("-inf"))
        sinks = self.step.layer.sinks
        assert sinks is not None, "heads have sinks"
        shares = torch.cat((scores, sinks.view(1, 1, -1, 1).expand(sequences, rows, -1, 1)), dim=3).softmax(dim=3)
        mixed = torch.matmul(shares[..., :-1].flatten(1, 2).to(keys.dtype), keys)
        return mixed.view(sequences * rows, heads, dim)


def rotate_pairs(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [n, heads, D], of which as many last elements as cos_sin float32 [n, 1, R] has are rotated, neighbours
    together; R / 2 cosines, then as many sines."""
    cos, sin = cos_sin.chunk(2, dim=2)
    kept, pairs = x.shape[2] - cos_sin.shape[2], x[:, :, x.shape[2] - cos_sin.shape[2] :].float()
    even, odd = pairs[:, :, 0::2], pairs[:, :, 1::2]
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=3).flatten(2)
    return torch.cat((x[:, :, :kept], rotated.to(x.dtype)), dim=2)


def _weights(layer: LayerWeights) -> CompressedWeights:
    assert layer.compressed is not None, "a model with compressed keys has them in every layer"
    return layer.compressed
