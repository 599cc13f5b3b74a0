"""Weights as codes of eight or four bits and their scales: rounding to them, and back. Knows no kernels and no files.

A code stands for a number that bf16 holds exactly, times the scale of its output, or of a group of its output's inputs,
which may have an offset that is added to each.
Activations stay as they are (W8A16, W4A16), except for `w8a8_int8` and `w8a8_fp8`: there each row of them is rounded
to int8 or fp8, too, with a scale of its own; products of int8 are sums of whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Code = Literal["int8", "int4", "fp8"]
"""int8: two's complement; int4: 0 to 15, less a zero point; fp8: float8_e4m3fn."""

Scheme = Literal["int8", "int4", "fp8", "w8a8_int8", "w8a8_fp8"]
"""What weights are rounded to: a code, or one with activations in the same, by SGLang's names for it."""
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)

GROUP_SIZES = (16, 32, 64, 128, 256, 512)
"""Inputs that may share a scale, beside all of them."""

INT4_GROUP = 128
_ZERO = 8
_INT8_MAX, _INT4_MAX = 127, 15
_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max
_SMALLEST_SCALE = 1e-12
"""Of outputs whose weights are all 0."""
_SMALLEST_ROW = 1e-30
"""The greatest of a row that counts as zeros: `kMin` of digits.cpp."""


class QuantizedWeight(NamedTuple):
    """A matrix [out, in] as codes."""

    code: Code
    codes: Tensor
    """uint8 [out, in]: the bits of each code, a byte for each."""
    scales: Tensor
    """float32 [out, groups]; groups is 1, or divides `in` into groups of one of GROUP_SIZES."""
    zeros: Tensor | None = None
    """uint8 [out, groups]: which code of int4 stands for 0; None: 8 everywhere."""
    offsets: Tensor | None = None
    """float32 [out, groups], of groups of GROUP_SIZES: what is added to each scaled number of a group; None: nothing.
    Not of fp8."""
    rounded_activations: bool = False
    """Of int8 and fp8 with a scale for each output: whether rows are rounded to the same by `round_rows` before they
    are multiplied."""

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def numbers(self) -> Tensor:
        """float32 [out, in]: what the codes stand for, not scaled."""
        match self.code:
            case "int8":
                return self.codes.view(torch.int8).float()
            case "fp8":
                return self.codes.view(_FP8).float()
            case "int4":
                if self.zeros is None:
                    return self.codes.float() - _ZERO
                return self.codes.float() - self.zeros.float().repeat_interleave(self.group_size, dim=1)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[out, in], rounded to `dtype` once."""
        return _scaled(self.numbers, self.scales, self.offsets).to(dtype)

    def part(self, rows: slice, columns: tuple[int, int], dtype: torch.dtype) -> QuantizedWeight | Tensor:
        """These outputs, and the inputs from the first of `columns` up to the second. Groups that the bounds cut become
        smaller ones; numbers in `dtype` where those would be smaller than any of GROUP_SIZES."""
        first, end = columns
        whole = self.outputs(rows)
        codes = whole.codes[:, first:end].contiguous()
        if self.scales.shape[1] == 1 and self.offsets is None:
            return whole._replace(codes=codes)
        size = gcd(self.group_size, first, end)
        if size not in GROUP_SIZES:
            return self.dequantized(dtype)[rows, first:end]
        groups, times = slice(first // size, end // size), self.group_size // size

        def cut(of_groups: Tensor) -> Tensor:
            return of_groups.repeat_interleave(times, dim=1)[:, groups]

        return whole.with_groups(cut)._replace(codes=codes)

    def outputs(self, which: slice | Tensor) -> QuantizedWeight:
        """These of its outputs, or those of an index for each."""
        return self._replace(codes=self.codes[which]).with_groups(lambda of_groups: of_groups[which])

    def with_groups(self, changed: Callable[[Tensor], Tensor]) -> QuantizedWeight:
        """With all that is [out, groups] `changed`."""
        zeros = None if self.zeros is None else changed(self.zeros)
        offsets = None if self.offsets is None else changed(self.offsets)
        return self._replace(scales=changed(self.scales), zeros=zeros, offsets=offsets)

    def to(self, device: torch.device) -> QuantizedWeight:
        """On `device`."""
        return self._replace(codes=self.codes.to(device)).with_groups(lambda of_groups: of_groups.to(device))


class QuantizedStack(NamedTuple):
    """Matrices of one shape as codes: of a mixture's experts."""

    weight: QuantizedWeight
    """[matrices * out, in]: the outputs of one behind those of the other."""
    matrix_count: int
    """Matrices."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """[matrices, out, in]"""
        outputs, inputs = self.weight.codes.shape
        return self.matrix_count, outputs // self.matrix_count, inputs

    @property
    def matrices(self) -> list[QuantizedWeight]:
        """One after the other, in the memory of all."""
        count, out, _ = self.shape
        return [self.weight.outputs(slice(first, first + out)) for first in range(0, count * out, out)]


WeightStack = Tensor | QuantizedStack
"""[matrices, out, in]"""


class ExpertBiases(NamedTuple):
    """What is added to the products of a mixture's experts."""

    gate_up: Tensor | None
    """float32 [E, 2 * I]"""
    down: Tensor | None
    """float32 [E, hidden]. None: there is none, or another rank adds it."""


def quantize(weight: Tensor, scheme: Scheme) -> QuantizedWeight:
    """weight [out, in] rounded to the nearest codes. int8 and fp8 have a scale for each output; int4 has one and a zero
    point for each 128 inputs, or for 64 or 32 where these divide them; where none does, int8 takes its place."""
    match scheme:
        case "int8":
            return _int8(weight.float())
        case "w8a8_int8":
            return _int8(weight.float())._replace(rounded_activations=True)
        case "fp8":
            return _fp8(weight.float())
        case "w8a8_fp8":
            return _fp8(weight.float())._replace(rounded_activations=True)
        case "int4":
            group = next((size for size in (INT4_GROUP, 64, 32) if weight.shape[1] % size == 0), None)
            return _int8(weight.float()) if group is None else _int4(weight.float(), group)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Their rows in one tensor. Of tensors without elements PyTorch would find its shape by code that imports its
    compiler, and Triton with it: 100 MiB, and a second."""
    if parts[0].device.type != "meta":
        return torch.cat(list(parts))
    return parts[0].new_empty((sum(len(part) for part in parts), *parts[0].shape[1:]))


def stack_outputs(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """One matrix with the outputs of all, which have the same inputs: in the code and the groups that hold each of them
    exactly, where they differ in how they are kept. None where there are none such."""
    if len({_kind(each) for each in weights}) > 1:
        if not all(_may_change(each) for each in weights):
            return None
        weights = _made_alike(weights)
    first = weights[0]
    zeros = [each.zeros for each in weights if each.zeros is not None]
    offsets = [each.offsets for each in weights if each.offsets is not None]
    return first._replace(
        codes=joined([each.codes for each in weights]),
        scales=joined([each.scales for each in weights]),
        zeros=joined(zeros) if zeros else None,
        offsets=joined(offsets) if offsets else None,
    )


def _may_change(weight: QuantizedWeight) -> bool:
    return weight.code != "fp8" and not weight.rounded_activations and weight.group_size in GROUP_SIZES


def _made_alike(weights: Sequence[QuantizedWeight]) -> list[QuantizedWeight]:
    size = min(each.group_size for each in weights)
    offset = any(each.offsets is not None for each in weights)
    return [_as_int8(each, size, offset) for each in weights]


def _as_int8(weight: QuantizedWeight, size: int, offset: bool) -> QuantizedWeight:
    """int4's numbers are int8's, too; a group may be cut into some of `size`; and an offset may be 0."""
    times = weight.group_size // size
    cut = weight.with_groups(lambda of_groups: of_groups.repeat_interleave(times, dim=1))
    if offset and cut.offsets is None:
        cut = cut._replace(offsets=torch.zeros_like(cut.scales))
    codes = weight.codes if weight.code == "int8" else weight.numbers.to(torch.int8).view(torch.uint8)
    return cut._replace(code="int8", codes=codes, zeros=None)


def _kind(weight: QuantizedWeight) -> tuple[object, ...]:
    groups = weight.scales.shape[1], weight.zeros is None, weight.offsets is None
    return weight.code, *groups, weight.rounded_activations


class RoundedRows(NamedTuple):
    """Rows as codes, each by a scale of its own."""

    codes: Tensor
    """float32 [n, in]: whole numbers from -127 to 127, or those of fp8."""
    scales: Tensor
    """float32 [n, 1]"""


def round_rows(x: Tensor, code: Code = "int8") -> RoundedRows:
    """x [n, in] to the nearest of int8 or fp8, ties to even, by the greatest of each row: dynamic quantisation by
    token, as vLLM and compressed-tensors do it. Of int8 the same bits as digits.cpp."""
    rows = x.float()
    most = rows.abs().amax(dim=1, keepdim=True)
    # Neither of both a number, for which PyTorch multiplies with a reciprocal, on GPUs `most / number` too.
    greatest = torch.full_like(most, _FP8_MAX if code == "fp8" else _INT8_MAX)
    inverse = torch.where(most > _SMALLEST_ROW, greatest / most, 0.0)
    scaled = rows * inverse
    codes = scaled.to(_FP8).float() if code == "fp8" else scaled.round_()
    return RoundedRows(codes, torch.where(most > _SMALLEST_ROW, most / greatest, 0.0))


def multiply_rounded(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """x [n, in] times a weight, rows rounded to its code first, in the dtype of x. Sums of int8 are of whole numbers as
    float32 has them: exact up to 2²⁴."""
    rows = round_rows(x, weight.code)
    product = rows.codes @ weight.numbers.T * (rows.scales * weight.scales.T)
    return (product if bias is None else product + bias.float()).to(x.dtype)


def _int8(weight: Tensor) -> QuantizedWeight:
    scales = (weight.abs().amax(dim=1, keepdim=True) / _INT8_MAX).clamp_(min=_SMALLEST_SCALE)
    codes = (weight / scales).round_().clamp_(-_INT8_MAX, _INT8_MAX).to(torch.int8)
    return QuantizedWeight("int8", codes.view(torch.uint8), scales)


def _fp8(weight: Tensor) -> QuantizedWeight:
    scales = (weight.abs().amax(dim=1, keepdim=True) / _FP8_MAX).clamp_(min=_SMALLEST_SCALE)
    codes = (weight / scales).clamp_(-_FP8_MAX, _FP8_MAX).to(_FP8)
    return QuantizedWeight("fp8", codes.view(torch.uint8), scales)


def _int4(weight: Tensor, group: int) -> QuantizedWeight:
    """Between the least and the greatest of each group, 0 being among the numbers that can be had."""
    groups = weight.view(len(weight), -1, group)
    low, high = groups.amin(dim=2).clamp_(max=0), groups.amax(dim=2).clamp_(min=0)
    scales = ((high - low) / _INT4_MAX).clamp_(min=_SMALLEST_SCALE)
    zeros = (-low / scales).round_()
    codes = (groups / scales.unsqueeze(2)).round_().add_(zeros.unsqueeze(2)).clamp_(0, _INT4_MAX)
    return QuantizedWeight("int4", codes.to(torch.uint8).view(weight.shape), scales, zeros.to(torch.uint8))


def _scaled(numbers: Tensor, scales: Tensor, offsets: Tensor | None) -> Tensor:
    made = numbers.view(len(numbers), scales.shape[1], -1) * scales.unsqueeze(2)
    return (made if offsets is None else made + offsets.unsqueeze(2)).view(numbers.shape)


def nibble_run(inputs: int) -> int:
    """How many inputs in a row lie in low bits in memory, before as many that lie in high bits of the same bytes: both
    are read as runs of neighbours, where a pair of neighbours in each byte had to be taken apart."""
    return 16 if inputs % 32 == 0 else 1


def pack_nibbles(codes: Tensor, run: int = 1) -> Tensor:
    """uint8 [out, in] below 16 → [out, in / 2]: of each 2 · `run` the first half in low bits, the others in high."""
    runs = codes.view(len(codes), -1, 2, run)
    return (runs[:, :, 0] | (runs[:, :, 1] << 4)).reshape(len(codes), -1)


def unpack_nibbles(packed: Tensor, run: int = 1) -> Tensor:
    """The reverse of `pack_nibbles`."""
    runs = packed.view(len(packed), -1, run)
    return torch.stack((runs & 15, runs >> 4), dim=2).view(len(packed), -1)
