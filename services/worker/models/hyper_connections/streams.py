"""Manifold-constrained hyper-connections (mHC; Xie et al., 2026): what a block reads of several residual streams, and
how they go on behind it. In float32, as the reference has it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.models.config import HyperConnections
from services.worker.models.weights import StreamMixing
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
    ops: Ops, streams: Tensor, weights: StreamMixing, config: HyperConnections, norm_eps: float
) -> tuple[Tensor, OpenBlock]:
    """streams [n, S, hidden] → the row that the block reads, [n, hidden], and what its output is to be given to."""
    count = config.streams
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


def close_streams(
    ops: Ops, streams: Tensor, weights: StreamMixing | None, config: HyperConnections, norm_eps: float
) -> Tensor:
    """streams [n, S, hidden] behind the last layer → the rows that the last norm reads, [n, hidden]. `weights`: None:
    their mean."""
    if weights is None:
        return streams.mean(dim=1)
    made = _projected(ops, streams, weights, norm_eps)
    return _joined(streams, (made * weights.scale + weights.base).sigmoid() + config.eps)


def _projected(ops: Ops, streams: Tensor, weights: StreamMixing, norm_eps: float) -> Tensor:
    flat = streams.flatten(1).float()
    return ops.linear(flat * torch.rsqrt(flat.square().mean(1, keepdim=True) + norm_eps), weights.matrix)


def _joined(streams: Tensor, shares: Tensor) -> Tensor:
    return torch.matmul(shares.unsqueeze(1), streams.float()).squeeze(1).to(streams.dtype)
