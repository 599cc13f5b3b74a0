"""Rows rounded to int8 or fp8 and their products, as Triton kernels: equal to what PyTorch rounds, and sums exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux only")

from services.worker.ops import quantized, triton_ops
from services.worker.ops.quantized import Code, QuantizedWeight, Scheme, multiply_rounded, quantize
from services.worker.ops.triton.rounded_linear import library_multiplies_fp8, rounded_linear
from services.worker.ops.triton.row_ops import round_rows
from services.worker.ops.triton_ops import TritonOps
from tests.support.kernels.kernel_device import DEVICE

DTYPES = {torch.float32: 2e-7, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}
"""How far the nearest may be, as a part; the interpreter cuts the digits of bfloat16 off."""


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("code", ["int8", "fp8"])
@pytest.mark.parametrize(("inputs", "dtype"), [(16, torch.float16), (100, torch.float32), (4096, torch.bfloat16)])
def test_rows_are_rounded_to_the_same_bits_as_elsewhere(inputs: int, dtype: torch.dtype, code: Code) -> None:
    """Rows of all sizes, zeros, ties, and one whose greatest counts as nothing."""
    x = drawn(9, inputs, seed=3) * torch.tensor([1.0, 1e-3, 30.0, 0.0, 1e-31, 7.0, 1.0, 2.0, 3.0]).to(DEVICE)[:, None]
    x[5] = torch.arange(inputs, device=DEVICE) % 255 / 2 - 63.5  # times two: each other number is a tie
    x = x.to(dtype)
    found, expected = round_rows(x, code), quantized.round_rows(x, code)
    assert torch.equal(found.codes.float(), expected.codes)
    assert torch.equal(found.scales, expected.scales.flatten())
    assert found.codes[3:5].float().count_nonzero() == 0


@pytest.mark.parametrize(
    ("odd", "scheme"), [(float("nan"), "w8a8_int8"), (float("inf"), "w8a8_int8"), (float("inf"), "w8a8_fp8")]
)
def test_a_row_with_a_number_that_is_none_shows_it(odd: float, scheme: Scheme) -> None:
    x = drawn(3, 64)
    x[1, 5] = odd
    product = rounded_linear(x, quantize(drawn(20, 64, seed=1), scheme), None)
    assert product[1].isnan().all()
    assert product[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 70, 256), (16, 33, 100), (17, 5, 16), (64, 96, 300), (130, 70, 256)]
)
def test_sums_are_whole_numbers_that_lose_nothing(rows: int, outputs: int, inputs: int) -> None:
    """With scales of 1 they come out as they are: rows and outputs that fill no tile, inputs that fill no step."""
    draw = torch.Generator().manual_seed(rows)
    codes = torch.randint(-127, 128, (rows, inputs), generator=draw).to(DEVICE)
    codes[:, 0] = 127  # so that each row's scale is 1
    weights = torch.randint(-127, 128, (outputs, inputs), generator=draw).to(DEVICE)
    weight = QuantizedWeight(
        "int8",
        weights.to(torch.int8).view(torch.uint8),
        torch.ones(outputs, 1, device=DEVICE),
        rounded_activations=True,
    )
    assert torch.equal(rounded_linear(codes.float(), weight, None).double(), codes.double() @ weights.double().T)


@pytest.mark.parametrize(
    ("scheme", "rows", "dtype"),
    [
        ("w8a8_int8", 3, torch.float32),
        ("w8a8_int8", 40, torch.float16),
        ("w8a8_int8", 3, torch.bfloat16),
        ("w8a8_fp8", 3, torch.float32),
        ("w8a8_fp8", 40, torch.float16),
        ("w8a8_fp8", 3, torch.bfloat16),
    ],
)
def test_products_are_those_of_the_cpus_operations(scheme: Scheme, rows: int, dtype: torch.dtype) -> None:
    """And, within a rounding of what comes out, of float64."""
    weight = quantize(drawn(70, 512, seed=1), scheme)
    x, bias = drawn(rows, 512, seed=2).to(dtype), drawn(70, seed=4).to(dtype)
    found = rounded_linear(x, weight, bias)
    assert found.dtype == dtype
    torch.testing.assert_close(found, multiply_rounded(x, weight, bias), rtol=2 * DTYPES[dtype], atol=1e-5)
    each = quantized.round_rows(x, weight.code)
    exact = each.codes.double() * each.scales.double() @ weight.dequantized(torch.float64).T + bias.double()
    torch.testing.assert_close(found.double(), exact, rtol=2 * DTYPES[dtype], atol=1e-4)


@pytest.mark.parametrize(("rows", "biased"), [(1, True), (70, False), (70, True)])
def test_rows_of_fp8_are_multiplied_by_pytorch_where_it_can(
    rows: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And by our kernel where it cannot, within a rounding of what comes out."""
    weight, x = quantize(drawn(48, 512, seed=1), "w8a8_fp8"), drawn(rows, 512, seed=2).bfloat16()
    bias = drawn(48, seed=4).bfloat16() if biased else None
    tried: list[int] = []
    real = torch._scaled_mm

    def counted(codes: torch.Tensor, *how: Any, **more: Any) -> torch.Tensor:
        tried.append(len(codes))
        return real(codes, *how, **more)

    def refused(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    expected = multiply_rounded(x, weight, bias)
    for product in (counted, refused):
        library_multiplies_fp8.cache_clear()
        monkeypatch.setattr(torch, "_scaled_mm", product)
        found = rounded_linear(x, weight, bias)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=0.02)
    assert tried[-1] == rows
    library_multiplies_fp8.cache_clear()


def test_rows_stay_as_they_are_where_no_tensor_core_multiplies_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before compute capability 8.9."""
    monkeypatch.setattr(triton_ops, "readable", lambda code, _device: code != "fp8")
    ops, x = TritonOps(DEVICE, torch.float32), drawn(3, 160, seed=2)
    for scheme, rounds in (("w8a8_fp8", False), ("w8a8_int8", True)):
        weight = quantize(drawn(48, 160, seed=1), scheme)
        found = ops.linear(x, ops.pack_quantized(weight, None)).double()
        exact = x.double() @ weight.dequantized(torch.float64).T
        assert bool((found - exact).norm() > 1e-3 * exact.norm()) is rounds


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    """Whatever tile it is in."""
    ops = TritonOps(DEVICE, torch.float32)
    packed = ops.pack_quantized(quantize(drawn(48, 160, seed=1), "w8a8_int8"), None)
    x = drawn(130, 160, seed=2)
    whole = ops.linear(x, packed)
    for rows in (1, 64):
        assert torch.equal(ops.linear(x[:rows], packed), whole[:rows])
