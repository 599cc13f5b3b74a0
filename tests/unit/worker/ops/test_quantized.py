"""Weights rounded to codes, and what PyTorch's operations make of them."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from services.worker.ops.quantized import (
    Code,
    QuantizedWeight,
    Scheme,
    pack_nibbles,
    quantize,
    round_rows,
    stack_outputs,
    unpack_nibbles,
)
from services.worker.ops.torch_ops import TorchOps
from tests.support.worker.native_batches import CPU, random

CODES: tuple[Code, ...] = get_args(Code)
LARGEST_ERROR = {"int8": 1 / 254, "fp8": 1 / 16, "int4": 1 / 15}
"""Of a weight, as a part of the greatest one of those that share its scale."""


@pytest.mark.parametrize("code", CODES)
def test_rounds_each_weight_to_the_nearest_code(code: Code) -> None:
    weight = random(70, 384, seed=1)
    quantized = quantize(weight, code)
    error = (quantized.dequantized(torch.float32) - weight).abs()
    groups = weight.abs().view(70, quantized.scales.shape[1], -1).amax(dim=2, keepdim=True)
    assert (error.view(70, quantized.scales.shape[1], -1) <= 1.01 * LARGEST_ERROR[code] * groups).all()
    assert quantized.group_size == (128 if code == "int4" else 384)


@pytest.mark.parametrize("code", CODES)
def test_weights_of_zero_stay_zero(code: Code) -> None:
    assert not quantize(torch.zeros(3, 64), code).dequantized(torch.float32).any()


@pytest.mark.parametrize(("inputs", "code", "group"), [(192, "int4", 64), (96, "int4", 32), (80, "int8", 80)])
def test_groups_are_as_large_as_divides_the_inputs(inputs: int, code: Code, group: int) -> None:
    quantized = quantize(random(5, inputs), "int4")
    assert (quantized.code, quantized.group_size) == (code, group)


def test_outputs_of_several_matrices_become_one_where_they_are_kept_alike() -> None:
    upper, lower = random(3, 64, seed=1), random(5, 64, seed=2)
    for code in CODES:
        stacked = stack_outputs([quantize(upper, code), quantize(lower, code)])
        assert stacked is not None
        expected = quantize(torch.cat((upper, lower)), code)
        assert torch.equal(stacked.dequantized(torch.float32), expected.dequantized(torch.float32))
    assert stack_outputs([quantize(upper, "int8"), quantize(lower, "fp8")]) is None


def test_parts_and_stacks_keep_the_offsets_of_their_groups() -> None:
    weight = quantize(random(6, 256, seed=1), "int4")._replace(offsets=random(6, 2, seed=2))
    whole = weight.dequantized(torch.float32)
    for columns in ((0, 256), (64, 256), (32, 160), (16, 144), (8, 200)):
        part = weight.part(slice(1, 5), columns, torch.float32)
        numbers = part if isinstance(part, torch.Tensor) else part.dequantized(torch.float32)
        assert torch.equal(numbers, whole[1:5, slice(*columns)])
        assert isinstance(part, torch.Tensor) is (columns == (8, 200))
    stacked = stack_outputs([weight.outputs(torch.tensor([3, 0])), weight.outputs(slice(4, 6))])
    assert stacked is not None
    assert torch.equal(stacked.dequantized(torch.float32), whole[[3, 0, 4, 5]])


def test_codes_that_differ_in_kind_become_ones_that_hold_them_all() -> None:
    """As Q4_K and Q6_K of one GGUF file do, where queries, keys and values are one matrix."""
    four = quantize(random(6, 256, seed=1), "int4")  # with zero points, of groups of 128
    offset = four._replace(zeros=None, offsets=random(6, 2, seed=2))
    eight = QuantizedWeight("int8", torch.randint(0, 256, (4, 256), dtype=torch.uint8), random(4, 16, seed=3))
    for weights in ((four, offset), (offset, eight), (four, eight), (eight, offset, four)):
        stacked = stack_outputs(weights)
        assert stacked is not None
        expected = torch.cat([each.dequantized(torch.float32) for each in weights])
        torch.testing.assert_close(stacked.dequantized(torch.float32), expected, rtol=0, atol=0)
    rounded = quantize(random(6, 256), "w8a8_int8")
    assert stack_outputs([rounded, eight]) is None


@pytest.mark.parametrize("scheme", ["w8a8_int8", "w8a8_fp8"])
def test_a_ranks_part_of_a_weight_rounds_its_share_of_a_row(scheme: Scheme) -> None:
    """By the greatest of the share."""
    whole, x = quantize(random(6, 256, seed=1), scheme), random(5, 256, seed=2)
    part = whole.part(slice(1, 5), (64, 160), torch.float32)
    assert isinstance(part, QuantizedWeight)
    rows = round_rows(x[:, 64:160], part.code)
    ops = TorchOps(CPU, torch.float32)
    expected = (rows.codes * rows.scales) @ whole.dequantized(torch.float32)[1:5, 64:160].T
    found = ops.linear(x[:, 64:160], ops.pack_quantized(part, None))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (found - x[:, 64:160] @ whole.dequantized(torch.float32)[1:5, 64:160].T).abs().max() > 1e-3


def test_nibbles_are_unpacked_to_what_was_packed() -> None:
    codes = torch.randint(0, 16, (7, 64), dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)


@pytest.mark.parametrize("code", CODES)
def test_pytorchs_product_is_that_of_the_numbers(code: Code) -> None:
    ops, x, bias = TorchOps(CPU, torch.float32), random(5, 256), random(40, seed=2)
    weight = quantize(random(40, 256, seed=1), code)
    expected = x.double() @ weight.dequantized(torch.float64).T + bias.double()
    torch.testing.assert_close(ops.linear(x, ops.pack_quantized(weight, bias)).double(), expected, rtol=1e-4, atol=1e-4)
