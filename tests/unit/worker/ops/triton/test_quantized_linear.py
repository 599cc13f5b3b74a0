"""Products with weights that stay codes, as a Triton kernel, against float64."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux only")

from services.worker.ops.quantized import Code, QuantizedStack, QuantizedWeight, nibble_run, pack_nibbles, quantize
from services.worker.ops.triton.quantized_linear import MAX_ROWS, multiplies, quantized_linear
from services.worker.ops.triton_ops import TritonOps
from tests.support.kernels.kernel_device import DEVICE

CODES: tuple[Code, ...] = get_args(Code)
ROUNDING = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Of what comes out, whose sums are of float32. The interpreter cuts the digits of bfloat16 off."""


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def check(weight: QuantizedWeight, rows: int, dtype: torch.dtype, *, biased: bool = False) -> None:
    outputs, inputs = weight.codes.shape
    x = drawn(rows, inputs, seed=7).to(dtype)
    bias = drawn(outputs, seed=8).to(dtype) if biased else None
    codes = pack_nibbles(weight.codes, nibble_run(inputs)) if weight.code == "int4" else weight.codes
    expected = x.double() @ weight.dequantized(torch.float64).T
    if bias is not None:
        expected += bias.double()
    got = quantized_linear(x, weight._replace(codes=codes), bias)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=1.01 * ROUNDING[dtype], atol=1e-3 * inputs**0.5)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("code", CODES)
def test_a_product_is_that_of_the_numbers(code: Code, dtype: torch.dtype) -> None:
    """Outputs that fill no tile, and a bias."""
    check(quantize(drawn(70, 256, seed=1), code), 3, dtype, biased=True)


@pytest.mark.parametrize("rows", [1, 16, 17, 64])
@pytest.mark.parametrize("code", CODES)
def test_rows_of_every_tile(code: Code, rows: int) -> None:
    check(quantize(drawn(66, 128, seed=1), code), rows, torch.bfloat16)


@pytest.mark.parametrize(("inputs", "group"), [(96, 32), (192, 64), (256, 128), (512, 256), (512, 512)])
def test_groups_of_inputs(inputs: int, group: int) -> None:
    """Of int4 with zero points and without, and of fp8 and int8, as checkpoints have them; with offsets as GGUF has."""
    numbers = torch.randint(0, 16, (40, inputs), dtype=torch.uint8, device=DEVICE)
    scales = drawn(40, inputs // group, seed=2).abs() + 0.1
    zeros = torch.randint(0, 16, (40, inputs // group), dtype=torch.uint8, device=DEVICE)
    check(QuantizedWeight("int4", numbers, scales, zeros), 5, torch.float32)
    check(QuantizedWeight("int4", numbers, scales), 5, torch.float32)
    offsets = drawn(40, inputs // group, seed=3)
    check(QuantizedWeight("int4", numbers, scales, offsets=offsets), 5, torch.float32)
    check(QuantizedWeight("int8", numbers, scales, offsets=offsets), 20, torch.float32)
    eight = torch.randint(0, 120, (40, inputs), dtype=torch.uint8, device=DEVICE)
    for code in ("int8", "fp8"):
        check(QuantizedWeight(code, eight, scales), 5, torch.float32)


@pytest.mark.parametrize("code", ["int4", "int8"])
def test_groups_that_are_smaller_than_tiles_become_numbers(code: Code) -> None:
    """As Q6_K and Q3_K of GGUF have them."""
    ops = TritonOps(DEVICE, torch.float32)
    numbers = torch.randint(0, 16, (40, 96), dtype=torch.uint8, device=DEVICE)
    weight = QuantizedWeight(code, numbers, drawn(40, 6, seed=2), offsets=drawn(40, 6, seed=3))
    x = drawn(5, 96, seed=4)
    expected = x.double() @ weight.dequantized(torch.float64).T
    made = ops.linear(x, ops.pack_quantized(weight, None))
    torch.testing.assert_close(made.double(), expected, rtol=1e-4, atol=1e-3)
    assert isinstance(ops._readable(QuantizedStack(weight, 1)), torch.Tensor)


@pytest.mark.parametrize("inputs", [40, 80, 768])
def test_inputs_that_fill_no_step(inputs: int) -> None:
    check(quantize(drawn(33, inputs, seed=1), "int8"), 4, torch.bfloat16)


@pytest.mark.parametrize("code", CODES)
def test_few_rows_are_multiplied_by_the_kernel_and_many_by_numbers(code: Code) -> None:
    """The same within a rounding; and many rows are not refused."""
    ops = TritonOps(DEVICE, torch.bfloat16)
    weight, x = quantize(drawn(48, 128, seed=1), code), drawn(MAX_ROWS + 1, 128, seed=2).to(torch.bfloat16)
    packed = ops.pack_quantized(weight, None)
    assert not multiplies(x, weight)
    assert multiplies(x[:MAX_ROWS], weight)
    few, many = ops.linear(x[:MAX_ROWS], packed), ops.linear(x, packed)
    torch.testing.assert_close(few.float(), many[:MAX_ROWS].float(), rtol=2.0**-6, atol=0.1)
