"""Weights around blocks whose residual is several streams, whole on every rank. Knows tensors alone."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from services.worker.ops.interface import PackedLinear, ShortConvolution


class StreamMixing(NamedTuple):
    """How a block's input is made of the streams, and where its output goes. float32."""

    matrix: PackedLinear
    """[outputs, streams * hidden]"""
    base: Tensor
    """[outputs]"""
    scale: Tensor
    """One number for each kind of outputs."""


class GatedMixing(NamedTuple):
    """The same of streams each element of which is gated: see `HyperConnections.rank`."""

    norm: Tensor
    """float32 [streams * hidden]"""
    down: PackedLinear
    """[rank, streams * hidden]"""
    up: PackedLinear
    """[streams * hidden, rank]: the sigmoid of its outputs is how much of each element is read."""
    added: PackedLinear | None
    """[streams, streams * hidden]: twice the sigmoid of its outputs is how much of the output each stream gets; None:
    there is no block."""


class GramWeights(NamedTuple):
    """What a layer adds of n-grams: see `GramConfig`."""

    multipliers: Tensor
    """int64 [size]: what the tokens of an n-gram are multiplied by, the newest first."""
    sizes: Tensor
    """int64 [size - 1, heads] values of each hash."""
    offsets: Tensor
    """The same: which row of the table its first value is."""
    table: Tensor
    """[rows, dim / hashes]"""
    keys: PackedLinear
    """[streams * hidden, dim]"""
    values: PackedLinear
    """[hidden, dim]"""
    key_norm: Tensor
    query_norm: Tensor
    value_norm: Tensor
    """float32 [streams * hidden]"""
    convolution: ShortConvolution
    tokens: ShortConvolution
    """What keeps the tokens before: each of its channels gives back one of them."""
