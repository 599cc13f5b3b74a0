"""Which rows of a table n-grams have: their hashes, as Qwen4's checkpoints were trained with them. No files."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from services.worker.models.config import GramConfig
from services.worker.models.layer_parts.streams import GramWeights

_WORD = (1 << 64) - 1
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Of splitmix64."""
_BETWEEN_LAYERS = 10_007


def multipliers(grams: GramConfig, vocab_size: int, number: int) -> Tensor:
    """int64 [size] of the layer of this number among those that have n-grams; odd, so that no product with a token is
    beyond 63 bits."""
    half = max(1, (((1 << 63) - 1) // max(vocab_size, 1)) // 2)
    base = grams.seed + _BETWEEN_LAYERS * number
    mixed = (_splitmix64((base + _GAMMA * (place + 1)) & _WORD) for place in range(grams.size))
    return torch.tensor([2 * (each % half) + 1 for each in mixed], dtype=torch.long)


def table_sizes(grams: GramConfig, number: int) -> tuple[Tensor, Tensor, int]:
    """Values of each hash, primes that follow each other over all layers, int64 [size - 1, heads]; which row is the
    first of each; and the table's rows."""
    sizes, prime = list[int](), grams.base - 1
    for _ in range((number + 1) * grams.hashes):
        prime = _next_prime(prime)
        sizes.append(prime)
    own = torch.tensor(sizes[-grams.hashes :], dtype=torch.long)
    offsets, rows = own.cumsum(0) - own, int(own.sum())
    shape = (grams.size - 1, grams.heads)
    return own.view(shape), offsets.view(shape), -(-rows // grams.divisor) * grams.divisor


def rows_of_grams(weights: GramWeights, ids: Tensor, before: Tensor, end: int) -> Tensor:
    """ids int64 [n], and the tokens before each [n, size - 1], the newest first, -1 where there is none → int64 [n,
    hashes] rows of the table. What lies before an `end` token, or the text's first, is `end`."""
    ended = (before < 0) | (before == end)
    tokens = torch.where(ended.cumsum(1) > 0, end, before)
    mixed, rows = ids * weights.multipliers[0], []
    for place in range(tokens.shape[1]):
        mixed = mixed ^ (tokens[:, place] * weights.multipliers[place + 1])
        rows.append(torch.remainder(mixed.unsqueeze(1), weights.sizes[place]) + weights.offsets[place])
    return torch.cat(rows, dim=1)


def _splitmix64(value: int) -> int:
    value = (value + _GAMMA) & _WORD
    value = ((value ^ (value >> 30)) * _FIRST) & _WORD
    value = ((value ^ (value >> 27)) * _SECOND) & _WORD
    return value ^ (value >> 31)


def _next_prime(value: int) -> int:
    value += 1
    while not _is_prime(value):
        value += 1
    return value


def _is_prime(value: int) -> bool:
    if value < 4:
        return value > 1
    return value % 2 == 1 and all(value % each for each in range(3, math.isqrt(value) + 1, 2))
