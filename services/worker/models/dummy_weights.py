"""Dummy weights: random ones from a config alone, to measure shapes without a checkpoint (--load-format dummy).

An element is a pure function of the seed, the tensor's name and the element's place, in integer arithmetic. So any part
of a tensor can be made by itself, every rank of any split has its share of the same model, and CPUs and GPUs have the
same weights. They are made where they are to lie, at the pace of its memory.
"""

from __future__ import annotations

import math
from hashlib import blake2b

import torch
from torch import Tensor

SEED = 0

_BIAS_SPREAD = 0.01
_WHOLE_NORM = "linear_attn.norm.weight"
"""Of gated delta nets: it is 1 even where the model stores its other norms as their difference from 1."""
_ELEMENTS_ON_CPU, _ELEMENTS_ON_CUDA = 1 << 20, 1 << 26
"""Mixed at a time: on a CPU as many as stay in its caches from one operation to the next."""

_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)))
_LAST_SHIFT = 16
"""Chris Wellons' `lowbias32` (https://nullprogram.com/blog/2018/07/31/), as shifts and factors of signed integers."""
_WEYL = 0x9E3779B9 - (1 << 32)


class DummyTensors:
    """A `checkpoint.TensorSource`. Has every tensor that it is asked for, in whatever shape.

    A matrix [..., out, in] is uniform with variance 1 / in, so that what it makes of normed rows has variance 1;
    embeddings are matrices here. Norms are 1, or 0 where the model stores them as their difference from 1.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, *, norm_offset: bool = False, seed: int = SEED
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._norm = 0.0 if norm_offset else 1.0
        self._seed = seed

    def __contains__(self, name: str) -> bool:
        return True

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Tensor:
        """Tensor `name`, or a range of its first or second dimension, on the device."""
        ranges = [(0, size) for size in shape]
        if rows is not None:
            ranges[0] = rows
        if columns is not None:
            ranges[1] = columns
        made = torch.empty([end - start for start, end in ranges], dtype=self._dtype, device=self._device)
        if name.endswith(_WHOLE_NORM):
            return made.fill_(1.0)
        if name.endswith(("norm.weight", "norm_f.weight")):
            return made.fill_(self._norm)
        spread = _BIAS_SPREAD if name.endswith((".bias", "_bias")) else math.sqrt(3 / shape[-1])
        self._fill(made, [self._keys(name, number, *each) for number, each in enumerate(ranges)], spread)
        return made

    def _keys(self, name: str, dimension: int, start: int, end: int) -> Tensor:
        """A random word for each index of a dimension; an element's is the sum of its own, mixed again."""
        digest = blake2b(f"{self._seed} {dimension} {name}".encode(), digest_size=4).digest()
        indices = torch.arange(start, end, dtype=torch.int32, device=self._device)
        return _mix_bits(indices.mul_(_WEYL).add_(int.from_bytes(digest, "little", signed=True)))

    def _fill(self, made: Tensor, keys: list[Tensor], spread: float) -> None:
        """Uniform in [-spread, spread): some rows (of the last dimension) at a time."""
        first = keys[0]
        for key in keys[1:-1]:
            first = (first.unsqueeze(-1) + key).flatten()
        if len(keys) == 1:
            made.copy_(_uniform(_mix_bits(first), spread))
            return
        flat, width = made.view(-1, made.shape[-1]), made.shape[-1]
        elements = _ELEMENTS_ON_CPU if self._device.type == "cpu" else _ELEMENTS_ON_CUDA
        step = max(1, elements // width)
        for at in range(0, len(flat), step):
            words = first[at : at + step].unsqueeze(1) + keys[-1]
            flat[at : at + step] = _uniform(_mix_bits(words), spread)


def _mix_bits(words: Tensor) -> Tensor:
    """Each 32-bit word to another that seems to have nothing to do with it; in place."""
    for shift, factor in _ROUNDS:
        words.bitwise_xor_(_shift_right(words, shift)).mul_(factor)
    return words.bitwise_xor_(_shift_right(words, _LAST_SHIFT))


def _shift_right(words: Tensor, count: int) -> Tensor:
    """To the right, filled with zeros: torch's own shift repeats the sign."""
    return (words >> count).bitwise_and_((1 << (32 - count)) - 1)


def _uniform(words: Tensor, spread: float) -> Tensor:
    return words.float().mul_(spread * 2.0**-31)
