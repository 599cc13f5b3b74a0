"""The native products with weights of eight and four bits against float64, and the same in every batch."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from services.worker.ops.native.build import Level, runnable_levels
from services.worker.ops.quantized import GROUP_SIZES, Code, QuantizedWeight, quantize
from tests.support.worker.native_batches import native, random

CODES: tuple[Code, ...] = get_args(Code)
ROWS = (1, 2, 3, 4, 6, 7, 17, 64, 97, 130)
SHAPES = ((64, 48), (768, 256), (100, 80), (33, 31), (1, 2), (192, 2048), (17, 1025))
"""(outputs, inputs): whole groups of outputs and ragged ones, one block of steps and several, odd numbers of inputs."""


def expected_of(x: Tensor, weight: QuantizedWeight, bias: Tensor) -> Tensor:
    return x.double() @ weight.dequantized(torch.float64).T + bias.double()


def check(dtype: torch.dtype, weight: QuantizedWeight, level: Level | None, counts: tuple[int, ...]) -> None:
    ops = native(dtype, level=level)
    out, inputs = weight.codes.shape
    bias = random(out, seed=2)
    packed = ops.pack_quantized(weight, bias)
    for count in counts:
        x = random(count, inputs, seed=count, dtype=ops.dtype)
        torch.testing.assert_close(
            ops.linear(x, packed).double(), expected_of(x, weight, bias), rtol=1e-4, atol=1e-5 * inputs**0.5
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(("out", "inputs"), SHAPES)
def test_equals_float64_for_any_number_of_rows(dtype: torch.dtype, code: Code, out: int, inputs: int) -> None:
    check(dtype, quantize(random(out, inputs, seed=1), code), None, ROWS)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("group", GROUP_SIZES)
def test_groups_of_inputs_have_scales_and_zero_points_of_their_own(code: Code, group: int) -> None:
    codes = torch.randint(0, 16 if code == "int4" else 120, (70, 1024), dtype=torch.uint8)
    scales = random(70, 1024 // group).abs()
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8)
    for given in (None, zeros) if code == "int4" else (None,):
        weight = QuantizedWeight(code, codes, scales / 100, given)
        check(torch.bfloat16, weight, None, (1, 3, 4, 40))


@pytest.mark.parametrize("level", runnable_levels())
@pytest.mark.parametrize("code", CODES)
def test_every_level_of_instructions_computes_the_same_function(level: Level, code: Code) -> None:
    check(torch.bfloat16, quantize(random(100, 1152, seed=1), code), level, (1, 4, 17))


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
@pytest.mark.parametrize("code", CODES)
def test_a_row_alone_equals_the_same_row_in_any_batch_bit_for_bit(code: Code, dtype: torch.dtype) -> None:
    ops = native(dtype)
    packed = ops.pack_quantized(quantize(random(200, 1280, seed=1), code), random(200, seed=2))
    x = random(130, 1280, dtype=dtype)
    alone = torch.cat([ops.linear(x[row : row + 1], packed) for row in range(len(x))])
    for count in (2, 3, 4, 17, 64, 130):
        assert torch.equal(ops.linear(x[:count], packed), alone[:count])
        assert torch.equal(ops.linear(x[-count:], packed), alone[-count:])


@pytest.mark.parametrize("code", CODES)
def test_the_number_of_threads_changes_no_bit(code: Code) -> None:
    weight, x = quantize(random(300, 768, seed=1), code), random(37, 768)
    first, *others = [
        ops.linear(x, ops.pack_quantized(weight, None))
        for ops in (native(torch.float32, threads) for threads in (1, 2, 3))
    ]
    assert all(torch.equal(first, other) for other in others)
