"""Rotary position embeddings: their configurations and the tables of cosines and sines that they give.

Su et al., "RoFormer" (arXiv:2104.09864); YaRN: Peng et al. (arXiv:2309.00071). Each configuration gives what the
`transformers` library computes for the same parameters.
"""

from __future__ import annotations

import math
from typing import assert_never

import torch
from msgspec import Struct
from torch import Tensor


class PlainRope(Struct, frozen=True, tag=True):
    """The rotation as RoFormer has it: frequency i is theta^(-2i / head size)."""

    theta: float


class LinearRope(Struct, frozen=True, tag=True):
    """Position interpolation: positions are divided by `factor`."""

    theta: float
    factor: float


class Llama3Rope(Struct, frozen=True, tag=True):
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between blended."""

    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


class YarnRope(Struct, frozen=True, tag=True):
    """YaRN: long wavelengths are interpolated, short ones kept, and attention is scaled by `magnitude`."""

    theta: float
    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    magnitude: float
    """What cosines and sines are multiplied by (the paper's attention temperature)."""
    truncate: bool


class FactoredRope(Struct, frozen=True, tag=True):
    """LongRoPE (arXiv:2402.13753) up to the length that was trained first: each frequency is divided by a factor."""

    theta: float
    factors: tuple[float, ...]
    magnitude: float
    """What cosines and sines are multiplied by."""


class ProportionalRope(Struct, frozen=True, tag=True):
    """The first frequencies of a whole head's rotation; what the others would rotate stays as it is (Gemma 4, LFM3)."""

    theta: float
    share: float
    """How many of the frequencies rotate."""
    factor: float
    """What they are divided by."""


STILL = ProportionalRope(theta=1.0, share=0.0, factor=1.0)
"""Rotates nothing."""

Rope = PlainRope | LinearRope | Llama3Rope | YarnRope | FactoredRope | ProportionalRope


_POSITIONS_AT_ONCE = 1 << 16


def cos_sin_table(rope: Rope, head_dim: int, positions: int, factors: Tensor | None = None) -> Tensor:
    """[positions, head_dim] float32: head_dim / 2 cosines, then as many sines, for each position from 0. `factors`
    [head_dim / 2]: what frequencies are multiplied by; None: nothing."""
    frequencies = _frequencies(rope, head_dim)
    if factors is not None:
        frequencies = frequencies.to(factors.device) * factors
    magnitude = rope.magnitude if isinstance(rope, YarnRope | FactoredRope) else 1.0
    table = torch.empty(positions, head_dim, device=frequencies.device)
    for first in range(0, positions, _POSITIONS_AT_ONCE):  # of a million, all at once take three tables beside this one
        part = torch.arange(first, min(first + _POSITIONS_AT_ONCE, positions), dtype=torch.float32)
        angles = torch.outer(part.to(frequencies.device), frequencies)
        torch.cat((angles.cos(), angles.sin()), dim=1, out=table[first : first + len(part)]).mul_(magnitude)
    return table


def rotations(table: Tensor, axes: Tensor, positions: Tensor) -> Tensor:
    """[n, head_dim] cosines and sines of rows with positions [3, n] by a `cos_sin_table`; axes [head_dim / 2]: which of
    the three each frequency goes by."""
    frequencies, axes = torch.arange(len(axes), device=table.device), axes.to(table.device)
    at = positions.long()[axes]  # [head_dim / 2, n]
    cosines = table[at, frequencies.unsqueeze(1)]
    sines = table[at, frequencies.unsqueeze(1) + len(axes)]
    return torch.cat((cosines, sines)).T.contiguous()


def query_scales(beta: float, length: int, table: Tensor) -> Tensor:
    """float32, of which number p // length is what queries at position p are multiplied by, 1 + beta · ln(1 + p //
    length); for as many positions as the rotation's `table` has, and where that is. Not computed by rows, as a
    logarithm of many numbers is not always that of each alone."""
    return torch.tensor([1 + beta * math.log1p(step) for step in range(-(-len(table) // length))], device=table.device)


def partly_rotated(head_dim: int, rotated: int, *, pairs: bool = False) -> Tensor:
    """[head_dim] in which order a head's elements are to lie where the first `rotated` are rotated, i together with
    i + rotated / 2, or neighbours as `pairs`, and operations rotate whole heads, i together with i + head_dim / 2."""
    half, rest = rotated // 2, (head_dim - rotated) // 2
    first, second = torch.arange(half), torch.arange(half, rotated)
    if pairs:
        first, second = torch.arange(0, rotated, 2), torch.arange(1, rotated, 2)
    return torch.cat((first, rotated + torch.arange(rest), second, rotated + rest + torch.arange(rest)))


def partly_rotating(table: Tensor, head_dim: int) -> Tensor:
    """A table for some elements → [positions, head_dim], of heads in the order of `partly_rotated`: the others stay as
    they are."""
    cosines, sines = table.chunk(2, dim=1)
    others = table.new_ones(len(table), (head_dim - table.shape[1]) // 2)
    return torch.cat((cosines, others, sines, torch.zeros_like(others)), dim=1)


def yarn_magnitude(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """The attention temperature of section 3.4 of the paper, with DeepSeek's two-scale variant."""
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """The temperature of a context `factor` times as long, 0.1 · mscale · ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _frequencies(rope: Rope, head_dim: int) -> Tensor:
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    match rope:
        case PlainRope():
            return plain
        case LinearRope():
            return plain / rope.factor
        case FactoredRope():
            return plain / torch.tensor(rope.factors)
        case ProportionalRope():
            rotating = int(rope.share * head_dim // 2)
            return torch.cat((plain[:rotating] / rope.factor, torch.zeros(head_dim // 2 - rotating)))
        case Llama3Rope():
            return _llama3_frequencies(rope, plain)
        case YarnRope():
            return _yarn_frequencies(rope, plain, head_dim)
        case _:
            assert_never(rope)


def _llama3_frequencies(rope: Llama3Rope, plain: Tensor) -> Tensor:
    wavelength = 2 * math.pi / plain
    span = rope.high_freq_factor - rope.low_freq_factor
    kept = ((rope.original_positions / wavelength - rope.low_freq_factor) / span).clamp(0, 1)
    return (1 - kept) * plain / rope.factor + kept * plain


def _yarn_frequencies(rope: YarnRope, plain: Tensor, head_dim: int) -> Tensor:
    def dimension_of(rotations: float) -> float:
        ratio = rope.original_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    interpolated = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / rope.factor * interpolated + plain * (1 - interpolated)
