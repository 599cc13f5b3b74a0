"""Which blocks of keys each row attends to. To each key/value head of each row they are a short sequence of its own, so
that operations for usual attention attend to them. Portable PyTorch.

The score of a block is the greatest of its tokens' (q · key of the indexer), for each head apart.
"""

from __future__ import annotations

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
    """int32 [n * KV, W] blocks of the cache, each so many times as many as there are heads, behind them the head."""
    lengths: Tensor
    """int32 [n * KV] tokens."""

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

    def choose(self) -> ChosenBlocks:
        """Of all rows."""
        meta, cache, parts = self.scored.meta, self.scored.cache.latents, []
        for piece, sequences, tokens in self.scored.pieces():
            keys = first_rows(cache, meta, sequences, tokens).float()
            tables = meta.block_tables[sequences]
            parts += [self._chosen(rows, keys, tables) for rows in self.scored.parts(piece, keys)]
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
        each = config.block // self.scored.meta.block_size
        blocks = (places.unsqueeze(2) * each + torch.arange(each, device=places.device)).flatten(1)
        blocks = blocks.clamp_max(tables.shape[1] - 1)
        own = tables.expand(len(positions), -1).repeat_interleave(heads, dim=0).gather(1, blocks)
        head = torch.arange(heads, dtype=torch.int32, device=own.device).repeat(len(positions)).unsqueeze(1)
        return own * heads + head, seen.sum(1, dtype=torch.int32)

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
        key = self.ops.rms_norm(key.contiguous(), self.weights.k_norm, self.eps)
        store_rows(self._turned(key.unsqueeze(1), meta, cos_sin).squeeze(1), meta, keys)
        if meta.max_context <= self.config.longest:
            return None
        normed = self.ops.rms_norm(queries.contiguous().view(-1, dim), self.weights.q_norm, self.eps).view(
            len(x), -1, dim
        )
        q = self._turned(normed, meta, cos_sin).to(keys.dtype).float()
        scored = IndexStep(q, q.new_empty(0), LatentCache(keys, keys), meta)
        return BlockChoice(self.config, scored).choose()

    def _turned(self, x: Tensor, meta: BatchMeta, cos_sin: Tensor) -> Tensor:
        """x [n, heads, dim] → the same, the first elements rotated, i together with that half of them behind it; by a
        table of whole heads."""
        half = self.rotated // 2
        turns = cos_sin[meta.positions.long()]
        middle = turns.shape[1] // 2
        cosines, sines = (turns[:, first : first + half].unsqueeze(1) for first in (0, middle))
        first, second, rest = torch.split(x.float(), [half, half, x.shape[2] - 2 * half], dim=2)
        return torch.cat((first * cosines - second * sines, second * cosines + first * sines, rest), dim=2)
