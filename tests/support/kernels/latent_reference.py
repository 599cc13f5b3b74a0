"""Latents of sequences in a paged cache, and what attention makes of them in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.ops.interface import LatentCache
from tests.support.worker.native_batches import random, rope_reference

EPS = 1e-6


@dataclass(frozen=True)
class LatentShape:
    heads: int
    rank: int
    rope_dim: int
    nope_dim: int = 16

    @property
    def scale(self) -> float:
        return (self.rank + self.rope_dim) ** -0.5


class LatentRows:
    """What one sequence's rows are made of, from its first token on."""

    def __init__(self, shape: LatentShape, context: int, cos_sin: Tensor, seed: int) -> None:
        self.shape, self.cos_sin = shape, cos_sin
        self.latents = _rounded(context, shape.rank + shape.rope_dim, seed=seed)
        self.q = _rounded(context, shape.heads, shape.nope_dim + shape.rope_dim, seed=seed + 1)
        self.absorbed = _rounded(context, shape.heads, shape.rank, seed=seed + 2)
        """What a query without its rotated elements was multiplied to."""

    def cached(self, norm: Tensor, dtype: torch.dtype) -> LatentCache:
        """[context, rank] and [context, rope_dim] in float64, rounded as the cache is."""
        rank = self.shape.rank
        latents, rotated = self.latents[:, :rank].double(), self.latents[:, rank:].unsqueeze(1)
        normed = latents / (latents.pow(2).mean(dim=-1, keepdim=True) + EPS).sqrt() * norm.double()
        keys = rope_reference(rotated, self.cos_sin[: len(rotated)]).squeeze(1)
        return LatentCache(normed.to(dtype).double(), keys.to(dtype).double())

    def queries(self) -> Tensor:
        """[context, H, rank + rope_dim] float64"""
        rotated = rope_reference(self.q[:, :, self.shape.nope_dim :], self.cos_sin[: len(self.q)])
        return torch.cat((self.absorbed.double(), rotated.double()), dim=2)

    def expected(self, norm: Tensor, dtype: torch.dtype, first: int, end: int) -> Tensor:
        """[end - first, H, rank] float64: what the rows from `first` on make of all latents up to theirs."""
        latents, rotated, _ = self.cached(norm, dtype)
        keys = torch.cat((latents, rotated), dim=1)[:end]
        scores = torch.einsum("rhd,td->hrt", self.queries()[first:end], keys) * self.shape.scale
        unseen = torch.arange(end) > torch.arange(first, end).unsqueeze(1)
        weights = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1)
        return torch.einsum("hrt,td->rhd", weights, latents[:end])


def _rounded(*shape: int, seed: int) -> Tensor:
    """Numbers that bfloat16 has too."""
    return random(*shape, seed=seed).bfloat16().float()
