"""What a layer adds of n-grams to the streams: embeddings that these gate, and a convolution over them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.models.config import GramConfig
from services.worker.models.grams.hashes import rows_of_grams
from services.worker.models.layer_parts.streams import GramWeights
from services.worker.ops.interface import BatchMeta, Ops, ShortConvolution, StateCache

FIRST_TOKEN = 64
"""What is added to a token where it is kept: the SiLU behind a convolution leaves such numbers as they are, and a zero
is no token."""
_MIN_GATE = 1e-6


def keeps_tokens(grams: GramConfig, device: torch.device) -> ShortConvolution:
    """Each channel is the token so many rows before."""
    weight = torch.zeros(grams.size, grams.size - 1, device=device)
    for place in range(grams.size - 1):
        weight[grams.size - 2 - place, place] = 1.0
    return ShortConvolution(weight, torch.zeros(grams.size - 1, device=device), gated=False)


def dilated(weight: Tensor, grams: GramConfig) -> ShortConvolution:
    """weight [channels, kernel], of rows that lie `size` apart, the oldest first."""
    spread = weight.new_zeros(grams.window, len(weight))
    spread[:: grams.size] = weight.t()
    return ShortConvolution(spread, weight.new_zeros(len(weight)), gated=False)


class GramAdder:
    """By the operations of one rank, whose streams are whole."""

    def __init__(
        self,
        grams: GramConfig,
        ops: Ops,
        mix: Callable[[Tensor, ShortConvolution, StateCache, BatchMeta], Tensor],
        eps: float,
    ) -> None:
        """`mix`: see `StateOps.mix`."""
        self._grams, self._ops, self._mix, self._eps = grams, ops, mix, eps

    def added(
        self, weights: GramWeights, streams: Tensor, ids: Tensor, meta: BatchMeta, caches: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """What is added to streams [n, S, hidden] of tokens ids [n]; `caches`: of the convolution, and of tokens."""
        rows, ids = len(ids), ids.long()
        window, kept = (StateCache(*each) for each in caches)
        given: Tensor = (ids + FIRST_TOKEN).float().unsqueeze(1).expand(-1, self._grams.size - 1).contiguous()
        before = self._mix(given, weights.tokens, kept, meta).long() - FIRST_TOKEN
        embedded = weights.table[rows_of_grams(weights, ids, before, self._grams.end)].flatten(1).to(streams.dtype)
        value = self._ops.linear(embedded, weights.values).float()
        keys = self._normed(self._ops.linear(embedded, weights.keys).view(streams.shape), weights.key_norm)
        gate = (keys * self._normed(streams, weights.query_norm)).sum(2, keepdim=True) / streams.shape[2] ** 0.5
        gate = gate.abs().clamp_min(_MIN_GATE).sqrt() * gate.sign()
        wide = value.repeat_interleave(streams.shape[1], dim=0)
        gated = self._ops.sigmoid_gated(wide, gate.reshape(-1, 1)).view(streams.shape)
        normed = self._normed(gated, weights.value_norm).flatten(1)
        mixed = self._mix(normed, weights.convolution, window, meta).float()
        return (gated + mixed.view(rows, *streams.shape[1:])).to(streams.dtype)

    def _normed(self, streams: Tensor, weight: Tensor) -> Tensor:
        return normed_streams(streams, weight, self._eps)


def normed_streams(streams: Tensor, weight: Tensor, eps: float) -> Tensor:
    """streams [n, S, hidden], each RMS-normed by itself; weight [S * hidden] → float32."""
    wide = streams.float()
    shares: Tensor = (wide.square().mean(2, keepdim=True) + eps).rsqrt()
    return wide * shares * weight.view(streams.shape[1:])
