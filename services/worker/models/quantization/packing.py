"""Codes that several methods pack into words of 32 bits or into bytes. Knows no checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 32
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which of the eight codes of a word is each output's (AWQ's `gemm` packs outputs 0, 2, 4, 6, 1, 3, 5, 7 in turn)."""
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice what a code of e2m1 without its sign (the fourth bit) stands for."""


def unpack_columns(words: Tensor, bits: int) -> Tensor:
    """int32 [n, m] → uint8 [n, m * 32 / bits]: the lowest bits are the first column. Three words have 32 codes of three
    bits, some of which begin in one and end in the next."""
    if bits == 3:
        return _unpack_threes(words)
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32, device=words.device)
    codes = (words.unsqueeze(2) >> shifts) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(1)


def _unpack_threes(words: Tensor) -> Tensor:
    first = torch.arange(0, 3 * _WORD, 3, device=words.device)
    word, shift = first // _WORD, first % _WORD
    threes = (words.long() & (1 << _WORD) - 1).view(len(words), -1, 3)
    following = threes[:, :, (word + 1).clamp(max=2)] << (_WORD - shift)
    return ((threes[:, :, word] >> shift | following) & 7).to(torch.uint8).flatten(1)


def unpack_rows(words: Tensor, bits: int) -> Tensor:
    """int32 [n, m] → uint8 [n * 32 / bits, m]: the lowest bits are the first row."""
    return unpack_columns(words.T, bits).T


def unpack_awq(words: Tensor) -> Tensor:
    """int32 [n, m] → uint8 [n, m * 8], out of the order that AWQ has them in."""
    codes = unpack_columns(words, 4).view(len(words), -1, len(_AWQ_ORDER))
    return codes[:, :, list(_AWQ_ORDER)].flatten(1)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """uint8 [..., n] of two numbers of four bits each (e2m1 of OCP Microscaling Formats 1.0), the first in the low
    bits → uint8 [..., 2 * n]: codes of int8 for twice the numbers, which are whole ones."""
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    if packed.is_meta:
        return packed.new_empty(shape)
    signed = torch.tensor((*_DOUBLED, *(-each for each in _DOUBLED)), dtype=torch.int8, device=packed.device)
    return signed[torch.stack((packed & 15, packed >> 4), dim=-1).view(shape).int()].view(torch.uint8)


def powers_of_two(exponents: Tensor) -> Tensor:
    """uint8 exponents plus 127 (e8m0 of the same) → float32."""
    return torch.exp2(exponents.double() - 127).float()
