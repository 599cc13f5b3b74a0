"""Manifold-constrained hyper-connections (mHC; Xie et al., 2026): what a block reads of several residual streams, and
how they go on behind it. In float32, as the reference has it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.models.config import HyperConnections
from services.worker.models.grams.adding import normed_streams
from services.worker.models.layer_parts.streams import GatedMixing, StreamMixing
from services.worker.ops.interface import Ops


class OpenBlock(NamedTuple):
    """Streams around a block that has not given its output yet."""

    streams: Tensor
    """[n, S, hidden]"""
    added: Tensor
    """[n, S]: how much of the output each stream gets."""
    mixed: Tensor | None
    """[n, S, S]: how much of each stream goes to each; its rows and columns add up to nearly 1. None: each goes to
    itself."""

    def close(self, output: Tensor) -> Tensor:
        """The block's output [n, hidden] → the streams behind it."""
        if self.mixed is None:
            made = self.added.unsqueeze(2) * output.float().unsqueeze(1)
            return (made + self.streams.float()).to(self.streams.dtype)
        kept = torch.matmul(self.mixed.transpose(1, 2), self.streams)
        return torch.baddbmm(kept, self.added.unsqueeze(2), output.to(kept.dtype).unsqueeze(1))

    def select(self, rows: Tensor) -> OpenBlock:
        """The same of some rows."""
        mixed = None if self.mixed is None else self.mixed.index_select(0, rows)
        return OpenBlock(self.streams.index_select(0, rows), self.added.index_select(0, rows), mixed)


def open_block(
    ops: Ops, streams: Tensor, weights: StreamMixing | GatedMixing, config: HyperConnections, norm_eps: float
) -> tuple[Tensor, OpenBlock]:
    """streams [n, S, hidden] → the row that the block reads, [n, hidden], and what its output is to be given to."""
    count = config.streams
    if isinstance(weights, GatedMixing):
        return _open_gated(ops, streams, weights, norm_eps)
    if not config.mixes:
        return _open_alone(ops, streams, weights, config, norm_eps)
    made = torch.split(_projected(ops, streams, weights, norm_eps), [count, count, count * count], dim=1)
    bases = torch.split(weights.base, [count, count, count * count])
    taken, added, mixed = (part * scale + base for part, scale, base in zip(made, weights.scale, bases, strict=True))
    mixed = mixed.view(-1, count, count).softmax(dim=2) + config.eps
    mixed = mixed / (mixed.sum(dim=1, keepdim=True) + config.eps)
    for _ in range(config.iterations - 1):  # Sinkhorn and Knopp's
        mixed = mixed / (mixed.sum(dim=2, keepdim=True) + config.eps)
        mixed = mixed / (mixed.sum(dim=1, keepdim=True) + config.eps)
    read = _joined(streams, taken.sigmoid() + config.eps)
    dtype = streams.dtype
    return read, OpenBlock(streams, (config.magnitude * added.sigmoid()).to(dtype), mixed.to(dtype))


def _open_alone(
    ops: Ops, streams: Tensor, weights: StreamMixing, config: HyperConnections, norm_eps: float
) -> tuple[Tensor, OpenBlock]:
    """Of streams that are not mixed."""
    made, bases = _projected(ops, streams, weights, norm_eps).chunk(2, dim=1), weights.base.chunk(2)
    taken, added = (part * scale + base for part, scale, base in zip(made, weights.scale, bases, strict=True))
    read = _joined(streams, taken.sigmoid() + config.eps)
    return read, OpenBlock(streams, config.magnitude * added.sigmoid() + config.eps, None)


def _open_gated(ops: Ops, streams: Tensor, weights: GatedMixing, norm_eps: float) -> tuple[Tensor, OpenBlock]:
    """Of streams each element of which is gated; nothing is added where there is no block. Through `ops`, as the last
    bit of PyTorch's sigmoid goes by where in a batch an element is."""
    count, dtype = streams.shape[1], streams.dtype
    normed = normed_streams(streams, weights.norm, norm_eps).to(dtype)
    flat = normed.flatten(1)
    low = ops.linear(flat, weights.down) / count
    made = ops.gated_act(torch.cat((low, torch.ones_like(low)), dim=1), "silu")
    shared = ops.sigmoid_gated(flat.clone(), ops.linear(made, weights.up))
    read = shared.view(streams.shape).float().mean(1).to(dtype)
    if weights.added is None:
        return read, OpenBlock(streams, streams.new_zeros(streams.shape[:2]), None)
    logits = ops.linear(flat, weights.added) / count
    return read, OpenBlock(streams, ops.sigmoid_gated(torch.full_like(logits, 2.0), logits).float(), None)


def close_streams(
    ops: Ops,
    streams: Tensor,
    weights: StreamMixing | GatedMixing | None,
    config: HyperConnections,
    norm_eps: float,
) -> Tensor:
    """streams [n, S, hidden] behind the last layer → the rows that the last norm reads, [n, hidden]. `weights`: None:
    their mean."""
    if weights is None:
        return streams.mean(dim=1)
    if isinstance(weights, GatedMixing):
        return _open_gated(ops, streams, weights, norm_eps)[0]
    made = _projected(ops, streams, weights, norm_eps)
    return _joined(streams, (made * weights.scale + weights.base).sigmoid() + config.eps)


def _projected(ops: Ops, streams: Tensor, weights: StreamMixing, norm_eps: float) -> Tensor:
    flat = streams.flatten(1).float()
    return ops.linear(flat * torch.rsqrt(flat.square().mean(1, keepdim=True) + norm_eps), weights.matrix)


def _joined(streams: Tensor, shares: Tensor) -> Tensor:
    return torch.matmul(shares.unsqueeze(1), streams.float()).squeeze(1).to(streams.dtype)
