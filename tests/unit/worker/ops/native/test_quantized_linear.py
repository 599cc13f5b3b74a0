"""The native products with weights of eight and four bits against float64, and the same in every batch."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from services.worker.ops.interface import Routing
from services.worker.ops.native.build import Level, runnable_levels
from services.worker.ops.quantized import (
    GROUP_SIZES,
    SCHEMES,
    Code,
    QuantizedStack,
    QuantizedWeight,
    Scheme,
    quantize,
    round_rows,
)
from tests.support.worker.native_batches import native, random

CODES: tuple[Code, ...] = get_args(Code)
ROWS = (1, 2, 3, 4, 6, 7, 17, 64, 97, 130)
SHAPES = ((64, 48), (768, 256), (100, 80), (33, 31), (1, 2), (192, 2048), (17, 1025))
"""(outputs, inputs): whole groups of outputs and ragged ones, one block of steps and several, odd numbers of inputs."""


def expected_of(x: Tensor, weight: QuantizedWeight, bias: Tensor) -> Tensor:
    return x.double() @ weight.dequantized(torch.float64).T + bias.double()


def in_digits(x: Tensor, weight: QuantizedWeight, digits: int) -> Tensor:
    """What products of rows rounded to digits are, sums of whole numbers in float64, to the last bit."""
    if digits == 1:
        rows = round_rows(x)
        return (rows.codes.double() @ weight.numbers.double().T).float() * (rows.scales * weight.scales.T)
    most, top = x.float().abs().amax(dim=1, keepdim=True), torch.tensor(32639.0)
    whole = (x.float() * (top / most)).round().double()
    return (whole @ weight.numbers.double().T).float() * (most / top * weight.scales.T)


def check(dtype: torch.dtype, weight: QuantizedWeight, level: Level | None, counts: tuple[int, ...]) -> None:
    ops = native(dtype, level=level)
    out, inputs = weight.codes.shape
    bias = random(out, seed=2)
    packed = ops.pack_quantized(weight, bias)
    # Of rows rounded to two digits, of which the greatest element may be that of a row of thousands.
    atol = 2e-4 if weight.code != "fp8" and dtype == torch.bfloat16 else 1e-5
    for count in counts:
        x = random(count, inputs, seed=count, dtype=ops.dtype)
        found = ops.linear(x, packed)
        torch.testing.assert_close(found.double(), expected_of(x, weight, bias), rtol=1e-4, atol=atol * inputs**0.5)
        assert torch.equal(ops.linear(x[-1:], packed), found[-1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(("out", "inputs"), SHAPES)
def test_equals_float64_for_any_number_of_rows(dtype: torch.dtype, code: Code, out: int, inputs: int) -> None:
    check(dtype, quantize(random(out, inputs, seed=1), code), None, ROWS)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("group", GROUP_SIZES)
def test_groups_of_inputs_have_scales_and_zero_points_of_their_own(code: Code, group: int) -> None:
    least_none = {"int4": 16, "int8": 256, "fp8": 120}
    codes = torch.randint(0, least_none[code], (70, 1024), dtype=torch.uint8)
    scales = random(70, 1024 // group).abs()
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8)
    for given in (None, zeros) if code == "int4" else (None,):
        weight = QuantizedWeight(code, codes, scales / 100, given)
        check(torch.bfloat16, weight, None, (1, 3, 4, 40))


@pytest.mark.parametrize("level", runnable_levels())
@pytest.mark.parametrize("code", ["int4", "int8"])
def test_groups_may_have_offsets(level: Level, code: Code) -> None:
    """As Q4_K, Q5_K and Q2_K of GGUF have them. One group of all inputs, and more than one block of steps."""
    for inputs, group in ((64, 64), (1024, 16), (1024, 32), (2048, 512)):
        codes = torch.randint(0, 16, (70, inputs), dtype=torch.uint8)
        scales, offsets = random(70, inputs // group, seed=3).abs() / 100, random(70, inputs // group, seed=4) / 10
        for dtype in (torch.float32, torch.bfloat16):
            check(dtype, QuantizedWeight(code, codes, scales, offsets=offsets), level, (1, 3, 4, 40, 97))


@pytest.mark.parametrize("level", runnable_levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_packed_table_are_what_its_codes_stand_for(level: Level, dtype: torch.dtype) -> None:
    """To the last bit; with groups of each kind, and one scale for all."""
    ops, codes = native(dtype, level=level), torch.randint(0, 16, (130, 96), dtype=torch.uint8)
    scales, offsets, zeros = random(130, 6, seed=3), random(130, 6, seed=4), torch.full((130, 6), 3, dtype=torch.uint8)
    ids = torch.tensor([129, 0, 63, 64, 0], dtype=torch.int32)
    for table in (
        QuantizedWeight("int8", codes * 16 + codes, scales, offsets=offsets),
        QuantizedWeight("int8", codes * 16 + codes, scales[:, :1]),
        QuantizedWeight("int4", codes, scales, zeros),
        QuantizedWeight("int4", codes, scales[:, :3].contiguous()),
    ):
        rows = ops.embed(ids, ops.pack_quantized(table, None))
        assert torch.equal(rows, table.dequantized(torch.float32)[ids])
        for unknown in (-1, 130):
            with pytest.raises(IndexError, match="vocabulary of 130"):
                ops.embed(torch.tensor([unknown], dtype=torch.int32), ops.pack_quantized(table, None))


@pytest.mark.parametrize("rows", [4, 24])
@pytest.mark.parametrize(
    ("code", "least", "zero", "groups"),
    [("int8", 128, None, 2), ("int8", 128, None, 1), ("int8", 127, None, 1), ("int4", 0, 15, 2), ("int4", 15, 0, 2)],
)
def test_the_greatest_sum_of_a_group_is_exact(code: Code, least: int, zero: int | None, groups: int, rows: int) -> None:
    """512 times a row's greatest element and the code furthest from 0: 32 bits just hold it."""
    ops, scales = native(torch.bfloat16), torch.ones(64, groups)
    zeros = None if zero is None else torch.full((64, 2), zero, dtype=torch.uint8)
    weight = QuantizedWeight(code, torch.full((64, 1024), least, dtype=torch.uint8), scales, zeros)
    x = (torch.ones(4, 1024) * torch.tensor([[1.0], [-1.0], [0.0], [3.0]])).repeat(rows // 4, 1)
    found = ops.linear(x.bfloat16(), ops.pack_quantized(weight, None))
    torch.testing.assert_close(found, x.float() @ weight.dequantized(torch.float32).T, rtol=1e-6, atol=0)


@pytest.mark.parametrize("level", runnable_levels())
@pytest.mark.parametrize("code", CODES)
def test_every_level_of_instructions_computes_the_same_function(level: Level, code: Code) -> None:
    check(torch.bfloat16, quantize(random(100, 1152, seed=1), code), level, (1, 4, 17, 40))


@pytest.mark.parametrize("level", runnable_levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_rows_give_the_same_bits_at_every_level(level: Level, dtype: torch.dtype) -> None:
    """Whole numbers, so equal to what they are in float64 and then scaled; -128, a row of zeros, and one too small."""
    ops = native(dtype, level=level)
    for out, inputs in SHAPES:
        weight = quantize(random(out, inputs, seed=1), "w8a8_int8")
        weight.codes[0, :] = 128  # the least
        bias = random(out, seed=2)
        packed = ops.pack_quantized(weight, bias)
        for count in (1, 6, 7, 97, 130):
            x = random(count, inputs, seed=count, dtype=dtype)
            x[count // 2] = 0.0
            x[count // 3] *= 1e-33
            assert torch.equal(ops.linear(x, packed), in_digits(x, weight, 1) + bias), (out, inputs, count)


def test_int8_in_bfloat16_is_exact_but_for_rounding_rows_to_two_digits() -> None:
    """To less than bfloat16 itself has: an outlier that is all of a row's norm is the worst case."""
    ops = native(torch.bfloat16)
    if not ops.kernels.multiplies_bytes:
        pytest.skip("this processor multiplies no bytes, so that rows stay as they are")
    for out, inputs in SHAPES:
        weight = quantize(random(out, inputs, seed=1), "int8")
        packed = ops.pack_quantized(weight, None)
        for count in (1, 2, 3, 4, 23, 24, 34, 45, 48, 49, 65, 97):
            x = random(count, inputs, seed=count, dtype=torch.bfloat16)
            assert torch.equal(ops.linear(x, packed), in_digits(x, weight, 2)), (out, inputs, count)
    fine = random(8, 8192, seed=3)
    fine[:, 5] = 91.0  # sqrt(8192) times the others
    half = fine.bfloat16()
    eye = quantize(torch.eye(8192)[:2048], "int8")
    kept = ops.linear(half, ops.pack_quantized(eye, None)) - half[:, :2048].float()
    lost = fine[:, :2048] - half[:, :2048].float()
    assert kept.square().mean() < lost.square().mean()


@pytest.mark.parametrize("rows", [4, 24])
@pytest.mark.parametrize("scheme", ["int8", "w8a8_int8", "int4"])
def test_what_is_no_number_stays_none_in_its_row_alone(scheme: Scheme, rows: int) -> None:
    ops, x = native(torch.bfloat16), random(rows, 96, dtype=torch.bfloat16)
    x[1, 5], x[3, 95] = float("nan"), float("inf")
    found = ops.linear(x, ops.pack_quantized(quantize(random(64, 96, seed=1).abs() + 1, scheme), None))
    assert found.isfinite().all(dim=1).tolist() == [True, False, True, False] + [True] * (rows - 4)


def test_the_greatest_sum_of_all_inputs_is_rounded_once() -> None:
    """Of 2,048 inputs, which neither 32 bits nor the floats of both digits' sums hold."""
    ops = native(torch.bfloat16)
    if not ops.kernels.multiplies_bytes:
        pytest.skip("this processor multiplies no bytes, so that rows stay as they are")
    weight = QuantizedWeight("int8", torch.randint(100, 128, (70, 2048), dtype=torch.uint8), torch.ones(70, 1))
    packed = ops.pack_quantized(weight, None)
    x = random(24, 2048, dtype=torch.bfloat16).abs() + 3
    found = ops.linear(x, packed)
    assert torch.equal(found, in_digits(x, weight, 2))
    assert torch.equal(found, torch.cat([ops.linear(row[None], packed) for row in x]))


def test_every_code_of_fp8_is_its_number() -> None:
    """Subnormal ones, too."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0  # which are no numbers
    ops = native(torch.float32)
    packed = ops.pack_quantized(QuantizedWeight("fp8", codes.view(256, 1), torch.ones(256, 1)), None)
    for rows in (1, 4):
        given = ops.linear(torch.ones(rows, 1), packed)
        assert torch.equal(given, codes.view(torch.float8_e4m3fn).float().expand(rows, 256))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("code", SCHEMES)
def test_a_row_alone_equals_the_same_row_in_any_batch_bit_for_bit(code: Scheme, dtype: torch.dtype) -> None:
    ops = native(dtype)
    packed = ops.pack_quantized(quantize(random(200, 1280, seed=1), code), random(200, seed=2))
    x = random(130, 1280, dtype=dtype)
    alone = torch.cat([ops.linear(x[row : row + 1], packed) for row in range(len(x))])
    for count in (2, 3, 4, 17, 64, 130):
        assert torch.equal(ops.linear(x[:count], packed), alone[:count])
        assert torch.equal(ops.linear(x[-count:], packed), alone[-count:])


@pytest.mark.parametrize("experts", [2, 5])
@pytest.mark.parametrize("code", ["int8", "int4"])
def test_a_row_is_the_same_among_few_and_many_rows_of_its_experts(code: Code, experts: int) -> None:
    """Each expert's many rows may be multiplied in another way than one (ADR 218), those of gates and ups, too."""
    ops = native(torch.bfloat16)
    gate_up, down = (
        QuantizedStack(quantize(random(experts * out, inputs, seed=2) / 8, code), experts)
        for out, inputs in ((256, 192), (192, 128))
    )
    packed, x, logits = ops.pack_experts(gate_up, down), random(130, 192, dtype=torch.bfloat16), random(130, experts)

    def mixed(rows: slice) -> Tensor:
        picks = ops.choose_experts(logits[rows], Routing(2, renormalised=True))
        return ops.mixture(x[rows], picks, packed, kind="silu")

    found = mixed(slice(None))
    assert all(torch.equal(mixed(slice(row, row + 1)), found[row : row + 1]) for row in range(0, 130, 9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("code", SCHEMES)
def test_the_number_of_threads_changes_no_bit(code: Scheme, dtype: torch.dtype) -> None:
    weight, x = quantize(random(300, 768, seed=1), code), random(37, 768, dtype=dtype)
    first, *others = [
        ops.linear(x, ops.pack_quantized(weight, None)) for ops in (native(dtype, threads) for threads in (1, 2, 3))
    ]
    assert all(torch.equal(first, other) for other in others)
