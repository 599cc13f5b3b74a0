"""Which blocks of keys each row attends to. To each key/value head of each row they are a short sequence of its own, so
that operations for usual attention attend to them. Portable PyTorch.

The score of a block is the greatest of its tokens' (q · key of the indexer), for each head apart.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.models.config import BlockIndexConfig
from services.worker.models.weights import BlockIndexWeights
from services.worker.ops.interface import BatchMeta, LatentCache, Ops
from services.worker.ops.torch_latent import IndexStep, best_tokens, first_rows, store_rows


class ChosenBlocks(NamedTuple):
    """What each head of each row attends to; row by row, head by head."""

    tables: Tensor
    """int32 [n * KV, W] blocks of the cache, each so many times as many as there are heads, behind them the head; of an
    indexer that is `pooled` [n, W] blocks of the cache."""
    lengths: Tensor
    """int32 [n * KV], or [n]: tokens."""

    def reads(self, meta: BatchMeta) -> BatchMeta:
        """The step in which each of them is a decode."""
        count, device = len(self.lengths), self.tables.device
        return BatchMeta(
            query_starts=torch.arange(count + 1, dtype=torch.int32, device=device),
            context_lens=self.lengths,
            block_tables=self.tables,
            slots=torch.zeros_like(self.lengths),
            positions=self.lengths - 1,
            logits_rows=meta.logits_rows,
            num_decodes=count,
            prefills=(),
            max_query=1,
            max_context=self.tables.shape[1] * meta.block_size,
            block_size=meta.block_size,
        )


class BlockChoice(NamedTuple):
    """One layer's choice in one step."""

    config: BlockIndexConfig
    scored: IndexStep
    """Queries float32 [n, KV, dim]; there are no weights."""
    pool: Callable[[Tensor], Tensor] | None
    """Makes keys of blocks [S, blocks, dim] of those of tokens [S, tokens, dim]; None: tokens are scored."""

    def choose(self) -> ChosenBlocks:
        """Of all rows."""
        meta, cache, parts = self.scored.meta, self.scored.cache.latents, []
        for piece, sequences, tokens in self.scored.pieces():
            keys, tables = first_rows(cache, meta, sequences, tokens), meta.block_tables[sequences]
            keys = keys.float() if self.pool is None else self.pool(keys).float()
            chosen = self._chosen if self.pool is None else self._chosen_together
            parts += [chosen(rows, keys, tables) for rows in self.scored.parts(piece, keys)]
        return ChosenBlocks(*(torch.cat(each) for each in zip(*parts, strict=True)))

    def _chosen(self, rows: slice, keys: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        """keys [S, tokens, dim] of S sequences with these block tables, to which the rows belong in turn, or all to
        one."""
        config, heads = self.config, self.scored.q.shape[1]
        positions = self.scored.meta.positions[rows].long()
        scores = self._scores(rows, keys, positions)
        places = best_tokens(scores.flatten(0, 1), config.chosen)
        seen = positions.repeat_interleave(heads).unsqueeze(1) + 1 - places * config.block
        seen = seen.clamp(0, config.block)
        seen[:, scores.shape[2] :] = 0  # fewer blocks than are chosen: what is behind them is the first again
        own = self._blocks(places, tables.expand(len(positions), -1).repeat_interleave(heads, dim=0))
        head = torch.arange(heads, dtype=torch.int32, device=own.device).repeat(len(positions)).unsqueeze(1)
        return own * heads + head, seen.sum(1, dtype=torch.int32)

    def _chosen_together(self, rows: slice, keys: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        """keys [S, blocks, dim]: the same for all heads, of whole blocks, and what is behind the last one."""
        config, q, (sequences, count, dim) = self.config, self.scored.q[rows], keys.shape
        positions = self.scored.meta.positions[rows].long()
        whole = (positions + 1) // config.block
        scores = torch.matmul(q.reshape(sequences, -1, dim), keys.transpose(1, 2)).view(*q.shape[:2], count)
        late = torch.arange(count, device=keys.device) >= whole.unsqueeze(1)
        places = best_tokens(scores.relu_().sum(1).masked_fill_(late, float("-inf")), config.chosen)
        taken = whole.clamp_max(config.chosen)
        places = torch.nn.functional.pad(places, (0, 1)).scatter_(1, taken.unsqueeze(1), whole.unsqueeze(1))
        lengths = taken * config.block + (positions + 1) % config.block
        return self._blocks(places, tables.expand(len(positions), -1)), lengths.int()

    def _blocks(self, places: Tensor, tables: Tensor) -> Tensor:
        """places [k, chosen] of sequences with these block tables [k, …] → [k, W] blocks of the cache."""
        each = self.config.block // self.scored.meta.block_size
        blocks = (places.unsqueeze(2) * each + torch.arange(each, device=places.device)).flatten(1)
        return tables.gather(1, blocks.clamp_max(tables.shape[1] - 1))

    def _scores(self, rows: slice, keys: Tensor, positions: Tensor) -> Tensor:
        """→ float32 [rows, KV, blocks]; -inf of blocks that a row does not see."""
        config, q, (sequences, tokens, dim) = self.config, self.scored.q[rows], keys.shape
        scores = torch.matmul(q.reshape(sequences, -1, dim), keys.transpose(1, 2)).view(*q.shape[:2], tokens)
        unseen = torch.arange(tokens, device=keys.device) > positions.unsqueeze(1)
        scores.masked_fill_(unseen.unsqueeze(1), float("-inf"))
        scores = torch.nn.functional.pad(scores, (0, -tokens % config.block), value=float("-inf"))
        of_blocks = scores.view(*q.shape[:2], -1, config.block).amax(3)
        before = positions.unsqueeze(1) // config.block - torch.arange(of_blocks.shape[2], device=keys.device)
        local = (before >= 0) & (before < config.local)
        return of_blocks.masked_fill_(local.unsqueeze(1), float("inf"))


class BlockIndex(NamedTuple):
    """The indexer of one layer in one step."""

    config: BlockIndexConfig
    weights: BlockIndexWeights
    ops: Ops
    eps: float
    rotated: int
    """Elements of a head that are rotated, the first ones."""

    def choose(self, x: Tensor, meta: BatchMeta, cos_sin: Tensor, keys: Tensor) -> ChosenBlocks | None:
        """x [n, hidden], normed; `keys` [blocks, 1, block_size, dim] has those of the rows then. None: all is attended
        to, as no sequence is longer than what is chosen."""
        dim, made = self.config.dim, self.ops.linear(x, self.weights.inputs)
        queries, key = torch.split(made, [made.shape[1] - dim, dim], dim=1)
        pooled, at = self.config.pooled, meta.positions.long()
        key = key.unsqueeze(1) if pooled else self._turned(self._key_normed(key).unsqueeze(1), at, cos_sin)
        store_rows(key.squeeze(1), meta, keys)
        if meta.max_context <= self.config.longest:
            return None
        normed = self.ops.rms_norm(queries.contiguous().view(-1, dim), self.weights.q_norm, self.eps).view(
            len(x), -1, dim
        )
        q = self._turned(normed, at, cos_sin).to(keys.dtype).float()
        scored = IndexStep(q, q.new_empty(0), LatentCache(keys, keys), meta)
        return BlockChoice(self.config, scored, partial(self._pooled, cos_sin) if pooled else None).choose()

    def _key_normed(self, key: Tensor) -> Tensor:
        return self.ops.rms_norm(key.contiguous(), self.weights.k_norm, self.eps)

    def _pooled(self, cos_sin: Tensor, keys: Tensor) -> Tensor:
        """keys [S, tokens, dim] as they are stored → [S, whole blocks, dim], each as if it were its first token's."""
        size, count = self.config.block, keys.shape[1] // self.config.block
        of_blocks = keys[:, : count * size].reshape(len(keys), count, size, -1)
        means = of_blocks.float().mean(2).to(keys.dtype)
        normed = self._key_normed(means.flatten(0, 1)).view(means.shape)
        firsts = torch.arange(count, device=keys.device) * size
        return self._turned(normed.transpose(0, 1), firsts, cos_sin).transpose(0, 1).to(keys.dtype)

    def _turned(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        """x [n, heads, dim] at positions [n] → the same, the first elements rotated, i together with that half of them
        behind it; by a table of whole heads."""
        half = self.rotated // 2
        turns = cos_sin[positions]
        middle = turns.shape[1] // 2
        cosines, sines = (turns[:, first : first + half].unsqueeze(1) for first in (0, middle))
        first, second, rest = torch.split(x.float(), [half, half, x.shape[2] - 2 * half], dim=2)
        return torch.cat((first * cosines - second * sines, second * cosines + first * sines, rest), dim=2)
