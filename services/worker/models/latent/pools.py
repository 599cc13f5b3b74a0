"""An indexer that chooses pools of neighbouring tokens (GLM-5-Next): a pool's key is a mean of its tokens' keys,
weighed element by element, and a token attends to the best pools that end before it, and to all tokens behind the last
whole pool. Portable PyTorch over the paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.ops.interface import BatchMeta, LatentCache
from services.worker.ops.torch_latent import IndexStep, LatentAttentionStep, best_tokens, first_rows


class ChosenPools(NamedTuple):
    """What rows attend to."""

    slots: Tensor
    """int64 [n, W]: of tokens; more than W - rate of chosen pools, and then rate - 1 behind the last whole one."""
    unseen: Tensor
    """bool [n, W]: which of them count for nothing."""


class PoolStep(NamedTuple):
    """One layer's choice in one step."""

    scored: IndexStep
    """Its cache has a token's key, and behind that how much each of its elements counts in its pool."""
    bias: Tensor
    """float32 [rate, dim]: is added to that by the token's place."""
    most: int
    """Pools that are chosen."""

    def choose(self) -> ChosenPools:
        """Of all rows."""
        slots, unseen = zip(*self._parts(), strict=True)
        return ChosenPools(torch.cat(slots), torch.cat(unseen))

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        meta, cache = self.scored.meta, self.scored.cache.index_keys
        assert cache is not None, "there are an indexer's keys"
        for piece, sequences, tokens in self.scored.pieces():
            keys = self._keys(first_rows(cache, meta, sequences, tokens))
            tables = meta.block_tables[sequences].long()
            for rows in self.scored.parts(piece, keys):
                places, unseen = self._chosen(rows, keys)
                blocks = tables.expand(len(places), -1).gather(1, places // cache.shape[2])
                yield blocks * cache.shape[2] + places % cache.shape[2], unseen

    def _chosen(self, rows: slice, keys: Tensor) -> tuple[Tensor, Tensor]:
        """keys [S, pools, dim] → as `ChosenPools` has it, but of tokens their positions."""
        rate, positions = len(self.bias), self.scored.meta.positions[rows].long().unsqueeze(1)
        within = torch.arange(rate, device=keys.device)
        last = torch.arange(keys.shape[1], device=keys.device) * rate + rate - 1
        scores = self.scored.scores(rows, keys).masked_fill_(last > positions, float("-inf"))
        pools = best_tokens(scores, self.most)
        chosen = (pools.unsqueeze(2) * rate + within).flatten(1)
        # Behind fewer pools than are chosen there are zeros.
        missing = torch.arange(self.most, device=keys.device) >= keys.shape[1]
        lost = (missing | (pools * rate + rate > positions + 1)).repeat_interleave(rate, dim=1)
        tail = torch.div(positions + 1, rate, rounding_mode="floor") * rate + within[:-1]
        late = tail > positions
        return torch.cat((chosen, tail.masked_fill(late, 0)), dim=1), torch.cat((lost, late), dim=1)

    def _keys(self, tokens: Tensor) -> Tensor:
        """[S, tokens, 2 * dim] → [S, whole pools, dim]"""
        rate, count = len(self.bias), tokens.shape[1] // len(self.bias)
        pools = tokens[:, : count * rate].reshape(len(tokens), count, rate, -1)
        keys, weights = pools.chunk(2, dim=3)
        shares = (weights.float() + self.bias).softmax(dim=2).to(keys.dtype)
        return (shares * keys).sum(dim=2)


def pooled_attention(q: Tensor, cache: LatentCache, meta: BatchMeta, scale: float, chosen: ChosenPools) -> Tensor:
    """See `LatentOps.attention`."""
    step = LatentAttentionStep(q, cache, meta, scale)
    return torch.cat([*step.attend_to(chosen.slots, chosen.unseen)])
