"""ggml's blocks whose codes stay codes: whole numbers times a scale for each 32 inputs, and maybe plus an offset.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h, `block_q4_0` and those behind it. Knows no
files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_GROUP = 32
_SIGNED = 128
"""What unsigned codes of eight bits stand for 0 by."""


class GgufCodes(NamedTuple):
    """A matrix as codes."""

    bits: int
    codes: Tensor
    """uint8 [out, in]; less 8 of four bits, less 128 of eight."""
    scales: Tensor
    """float16 or float32 [out, in / 32]"""
    offsets: Tensor | None = None
    """float32, of the same shape: what is added to each scaled number."""

    def outputs(self, order: Tensor) -> GgufCodes:
        """Its outputs in the order of `order`, an index for each."""
        offsets = None if self.offsets is None else self.offsets[order]
        return self._replace(codes=self.codes[order], scales=self.scales[order], offsets=offsets)


def read_codes(kind: int, data: Tensor, shape: tuple[int, int]) -> GgufCodes | None:
    """data uint8: the blocks of a matrix of `shape`, [out, in], in ggml's type of the number `kind`. None where its
    codes cannot stay what they are. Raises RuntimeError where the blocks do not fit the shape."""
    if kind not in _READERS:
        return None
    out, inputs = shape
    size, reader = _READERS[kind]
    return reader(data.view(out, inputs // size, -1), shape)


def _q8_0(blocks: Tensor, shape: tuple[int, int]) -> GgufCodes:
    return GgufCodes(8, blocks[..., 2:].reshape(shape) ^ _SIGNED, _halves(blocks, 0))


def _q4_0(blocks: Tensor, shape: tuple[int, int]) -> GgufCodes:
    return GgufCodes(4, _by_halves(blocks[..., 2:]).view(shape), _halves(blocks, 0))


def _q4_1(blocks: Tensor, shape: tuple[int, int]) -> GgufCodes:
    scales, least = _halves(blocks, 0), _halves(blocks, 2)
    return GgufCodes(4, _by_halves(blocks[..., 4:]).view(shape), scales, least.float() + 8 * scales.float())


def _q5_0(blocks: Tensor, shape: tuple[int, int]) -> GgufCodes:
    codes = _by_halves(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return GgufCodes(8, (codes + (_SIGNED - 16)).view(shape), _halves(blocks, 0))


def _q5_1(blocks: Tensor, shape: tuple[int, int]) -> GgufCodes:
    codes = _by_halves(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    scales, least = _halves(blocks, 0), _halves(blocks, 2)
    return GgufCodes(8, (codes + (_SIGNED - 16)).view(shape), scales, least.float() + 16 * scales.float())


def _q4_k(blocks: Tensor, shape: tuple[int, int]) -> GgufCodes:
    scales, least = _scales_and_minima(blocks)
    return GgufCodes(4, _by_quarters(blocks[..., 16:]).view(shape), scales, 8 * scales - least)


def _q5_k(blocks: Tensor, shape: tuple[int, int]) -> GgufCodes:
    scales, least = _scales_and_minima(blocks)
    fifth = (blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8).unsqueeze(1)) & 1
    codes = _by_quarters(blocks[..., 48:]) | fifth.flatten(2) << 4
    return GgufCodes(8, (codes + (_SIGNED - 16)).view(shape), scales, 16 * scales - least)


_READERS: dict[int, tuple[int, Callable[[Tensor, tuple[int, int]], GgufCodes]]] = {
    2: (32, _q4_0),
    3: (32, _q4_1),
    6: (32, _q5_0),
    7: (32, _q5_1),
    8: (32, _q8_0),
    12: (256, _q4_k),
    13: (256, _q5_k),
}
"""By ggml's number of a type: the inputs of a block, and what reads them. Of types not here, groups are of 16 inputs,
or codes stand for no whole numbers."""


def _halves(blocks: Tensor, first: int) -> Tensor:
    """float16 [out, blocks]: what lies at byte `first` of each."""
    return blocks[..., first : first + 2].contiguous().view(torch.float16).view(blocks.shape[:2])


def _by_halves(packed: Tensor) -> Tensor:
    """[out, blocks, 16] → [out, blocks, 32]: the first half of a block's inputs lies in the low bits."""
    return torch.cat((packed & 15, packed >> 4), dim=2)


def _by_quarters(packed: Tensor) -> Tensor:
    """[out, blocks, 128] → [out, blocks, 256]: as `_by_halves`, of each 64 inputs."""
    return _by_halves(packed.reshape(len(packed), -1, _GROUP)).view(*packed.shape[:2], -1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """[out, blocks, 4] → [out, blocks, 32]: 16 where the bit of an input is set."""
    bits = (packed.unsqueeze(3) >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(2) << 4


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [out, groups] of both, of blocks of eight groups: six bits of each, times a float for all. The first four
    are the low bits of four bytes each; the upper two bits of the others are the high ones of those."""
    low_scales, low_minima, others = (blocks[..., first : first + 4] for first in (4, 8, 12))
    scales = torch.cat((low_scales & 63, (others & 15) | (low_scales >> 2 & 48)), dim=2)
    minima = torch.cat((low_minima & 63, (others >> 4) | (low_minima >> 2 & 48)), dim=2)
    times, least = (_halves(blocks, first).float().unsqueeze(2) for first in (0, 2))
    return (times * scales).flatten(1), (least * minima).flatten(1)
