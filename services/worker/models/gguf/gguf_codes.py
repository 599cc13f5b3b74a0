"""ggml's blocks whose codes stay codes: whole numbers times a scale for each 16 or 32 inputs, and maybe plus an offset.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h, `block_q4_0` and those behind it. Knows no
files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_SIGNED = 128
"""What unsigned codes of eight bits stand for 0 by."""
_IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""`kvalues_iq4nl` of ggml-common.h."""
_MXFP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""`kvalues_mxfp4`: twice the numbers."""


class GgufCodes(NamedTuple):
    """A matrix as codes."""

    bits: int
    codes: Tensor
    """uint8 [out, in]; less 8 of four bits, less 128 of eight."""
    scales: Tensor
    """float16 or float32 [out, groups]"""
    offsets: Tensor | None = None
    """float32, of the same shape: what is added to each scaled number."""

    def outputs(self, order: Tensor) -> GgufCodes:
        """Its outputs in the order of `order`, an index for each."""
        offsets = None if self.offsets is None else self.offsets[order]
        return self._replace(codes=self.codes[order], scales=self.scales[order], offsets=offsets)


def has_codes(kind: int) -> bool:
    """Whether `read_codes` knows ggml's type of this number."""
    return kind in _READERS


def read_codes(kind: int, data: Tensor, shape: tuple[int, int]) -> GgufCodes | None:
    """data uint8: the blocks of a matrix of `shape`, [out, in], in ggml's type of the number `kind`. None where its
    codes cannot stay what they are. Raises RuntimeError where the blocks do not fit the shape."""
    if not has_codes(kind):
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
    return GgufCodes(4, _fields(blocks[..., 16:], 4, 32).view(shape), scales, 8 * scales - least)


def _q5_k(blocks: Tensor, shape: tuple[int, int]) -> GgufCodes:
    scales, least = _scales_and_minima(blocks)
    codes = _fields(blocks[..., 48:], 4, 32) | _fields(blocks[..., 16:48], 1, 32) << 4
    return GgufCodes(8, (codes + (_SIGNED - 16)).view(shape), scales, 16 * scales - least)


def _q6_k(blocks: Tensor, shape: tuple[int, int]) -> GgufCodes:
    low, high = _fields(blocks[..., :128], 4, 64), _fields(blocks[..., 128:192], 2, 32)
    scales = _halves(blocks, 208).float().unsqueeze(2) * blocks[..., 192:208].view(torch.int8)
    return GgufCodes(8, ((low | high << 4) + (_SIGNED - 32)).view(shape), scales.flatten(1))


def _q3_k(blocks: Tensor, shape: tuple[int, int]) -> GgufCodes:
    """Of three bits, whose upper ones lie together: set where nothing is taken away."""
    codes = _fields(blocks[..., 32:96], 2, 32) | _fields(blocks[..., :32], 1, 32) << 2
    low, high = _fields(blocks[..., 96:104], 4, 8), _fields(blocks[..., 104:108], 2, 4)
    scales = _halves(blocks, 108).float().unsqueeze(2) * ((low | high << 4).float() - 32)
    return GgufCodes(4, (codes + 4).view(shape), scales.flatten(1))


def _q2_k(blocks: Tensor, shape: tuple[int, int]) -> GgufCodes:
    both = blocks[..., :16]
    scales, least = _halves(blocks, 80).float().unsqueeze(2), _halves(blocks, 82).float().unsqueeze(2)
    codes = _fields(blocks[..., 16:80], 2, 32) + 8
    return GgufCodes(4, codes.view(shape), (scales * (both & 15)).flatten(1), (-least * (both >> 4)).flatten(1))


def _iq4_nl(blocks: Tensor, shape: tuple[int, int]) -> GgufCodes:
    return GgufCodes(8, _levels(_IQ4_LEVELS, _by_halves(blocks[..., 2:])).view(shape), _halves(blocks, 0))


def _iq4_xs(blocks: Tensor, shape: tuple[int, int]) -> GgufCodes:
    low, high = _fields(blocks[..., 4:8], 4, 1), _fields(blocks[..., 2:4], 2, 1)
    scales = _halves(blocks, 0).float().unsqueeze(2) * ((low | high << 4).float() - 32)
    return GgufCodes(8, _levels(_IQ4_LEVELS, _by_halves(blocks[..., 8:])).view(shape), scales.flatten(1))


def _mxfp4(blocks: Tensor, shape: tuple[int, int]) -> GgufCodes:
    """A power of two for each block."""
    scales = torch.exp2(blocks[..., 0].double() - 128).float()
    return GgufCodes(8, _levels(_MXFP4_LEVELS, _by_halves(blocks[..., 1:])).view(shape), scales)


_READERS: dict[int, tuple[int, Callable[[Tensor, tuple[int, int]], GgufCodes]]] = {
    2: (32, _q4_0),
    3: (32, _q4_1),
    6: (32, _q5_0),
    7: (32, _q5_1),
    8: (32, _q8_0),
    10: (256, _q2_k),
    11: (256, _q3_k),
    12: (256, _q4_k),
    13: (256, _q5_k),
    14: (256, _q6_k),
    20: (32, _iq4_nl),
    23: (256, _iq4_xs),
    39: (32, _mxfp4),
}
"""By ggml's number of a type: the inputs of a block, and what reads them. Of types not here (IQ1 to IQ3), several codes
are one word of a list."""


def _halves(blocks: Tensor, first: int) -> Tensor:
    """float16 [out, blocks]: what lies at byte `first` of each."""
    return blocks[..., first : first + 2].contiguous().view(torch.float16).view(blocks.shape[:2])


def _by_halves(packed: Tensor) -> Tensor:
    """[out, blocks, n] → [out, blocks, 2 * n]: of each 32 inputs the first half lies in the low bits."""
    return _fields(packed, 4, 16)


def _fields(packed: Tensor, bits: int, width: int) -> Tensor:
    """[out, blocks, n] → [out, blocks, n * 8 / bits]: the lowest `bits` of each `width` bytes, then the next ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).unsqueeze(1)
    fields = packed.reshape(*packed.shape[:2], -1, 1, width) >> shifts & ((1 << bits) - 1)
    return fields.flatten(2)


def _levels(levels: tuple[int, ...], codes: Tensor) -> Tensor:
    """Codes of eight bits for the numbers that `codes` are the places of."""
    return (torch.tensor(levels) + _SIGNED).to(torch.uint8)[codes.long()]


def _fifth_bits(packed: Tensor) -> Tensor:
    """[out, blocks, 4] → [out, blocks, 32]: 16 where the bit of an input is set."""
    return _fields(packed, 1, 1) << 4


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [out, groups] of both, of blocks of eight groups: six bits of each, times a float for all. The first four
    are the low bits of four bytes each; the upper two bits of the others are the high ones of those."""
    low_scales, low_minima, others = (blocks[..., first : first + 4] for first in (4, 8, 12))
    scales = torch.cat((low_scales & 63, (others & 15) | (low_scales >> 2 & 48)), dim=2)
    minima = torch.cat((low_minima & 63, (others >> 4) | (low_minima >> 2 & 48)), dim=2)
    times, least = (_halves(blocks, first).float().unsqueeze(2) for first in (0, 2))
    return (times * scales).flatten(1), (least * minima).flatten(1)
