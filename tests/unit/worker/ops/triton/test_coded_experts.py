"""Mixtures whose experts stay codes, as Triton kernels, against float64."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is for Linux only")

from services.worker.ops.interface import Activation, Routing
from services.worker.ops.quantized import Code, QuantizedStack, QuantizedWeight, Scheme, quantize, stack_outputs
from services.worker.ops.triton.codes import code_stack, numbers_of
from services.worker.ops.triton_ops import TritonOps
from tests.support.kernels.kernel_device import DEVICE
from tests.support.models.expert_mixtures import MixedExperts, Shape, exactly_gated

CODES: tuple[Code, ...] = get_args(Code)


def coded(stack: Tensor, code: Scheme) -> QuantizedStack:
    together = stack_outputs([quantize(each, code) for each in stack])
    assert together is not None
    return QuantizedStack(together, len(stack))


def exactly(stack: QuantizedStack) -> Tensor:
    return torch.stack([each.dequantized(torch.float32) for each in stack.matrices])


@pytest.mark.parametrize(
    ("rows", "dtype"), [(1, torch.float32), (1, torch.bfloat16), (9, torch.float32)], ids=["codes", "half", "tiles"]
)
@pytest.mark.parametrize("code", CODES)
def test_a_mixture_of_codes_is_that_of_their_numbers(code: Code, rows: int, dtype: torch.dtype) -> None:
    mixed = MixedExperts(Shape(hidden=32, size=32, dtype=dtype), rows)
    gate_up, down = (coded(stack, code) for stack in (mixed.gate_up, mixed.down))
    mixed.gate_up, mixed.down = exactly(gate_up), exactly(down)
    ops = TritonOps(DEVICE, dtype)
    packed = ops.pack_experts(gate_up, down)
    mixed.check(ops.mixture(mixed.x, ops.choose_experts(mixed.logits, Routing(2, True)), packed, kind="silu"))


@pytest.mark.parametrize(("rows", "kind", "dtype"), [(1, "silu", torch.float32), (12, "swigluoai", torch.float32)])
@pytest.mark.parametrize("scheme", ["w8a8_int8", "w8a8_fp8"])
def test_a_mixture_rounds_rows_as_its_experts_linear_layers_do(
    rows: int, kind: Activation, dtype: torch.dtype, scheme: Scheme
) -> None:
    """Rows, and what is between an expert's two products; few rows and tiles of many, with biases."""
    mixed = MixedExperts(Shape(hidden=72, size=40, dtype=dtype, kind=kind, biased=kind != "silu"), rows)
    gate_up, down = (coded(stack, scheme) for stack in (mixed.gate_up, mixed.down))
    ops = TritonOps(DEVICE, dtype)
    picks = ops.choose_experts(mixed.logits, Routing(2, True))
    found = ops.mixture(mixed.x, picks, ops.pack_experts(gate_up, down, mixed.biases), kind=kind)
    expected, exact = torch.zeros_like(mixed.x), torch.zeros_like(mixed.x)
    for expert, pair in enumerate(zip(gate_up.matrices, down.matrices, strict=True)):
        biases = [None if each is None else each[expert] for each in mixed.biases]
        chances = (picks.chances * (picks.experts == expert)).sum(dim=1, keepdim=True)
        for total, rounds in ((expected, True), (exact, False)):
            packed = [
                ops.pack_quantized(weight._replace(rounded_activations=rounds), bias)
                for weight, bias in zip(pair, biases, strict=True)
            ]
            gate, up = ops.linear(mixed.x, packed[0]).double().chunk(2, dim=1)
            total += chances * ops.linear(exactly_gated(gate, up, kind).to(dtype), packed[1])
    differences = (found - expected).abs().flatten()
    # The last bit of what is between may take an element to the next step.
    assert differences.median() < 1e-6
    assert differences.max() < 0.1 * (found - exact).abs().max()


@pytest.mark.parametrize("code", CODES)
def test_picks_of_other_ranks_are_left_out(code: Code) -> None:
    mixed = MixedExperts(Shape(hidden=32, size=32), 1)
    gate_up, down = (coded(stack, code) for stack in (mixed.gate_up, mixed.down))
    ops = TritonOps(DEVICE, torch.float32)
    packed, picks = ops.pack_experts(gate_up, down), ops.choose_experts(mixed.logits, Routing(2, True))
    parts = [
        ops.mixture(mixed.x, picks._replace(experts=picks.experts.masked_fill(out.to(DEVICE), -1)), packed, kind="silu")
        for out in (torch.tensor([[True, False]]), torch.tensor([[False, True]]), torch.tensor([[True, True]]))
    ]
    assert not parts[2].any()
    assert torch.allclose(parts[0] + parts[1], ops.mixture(mixed.x, picks, packed, kind="silu"), atol=1e-5)


def test_biases_are_added_to_products_of_codes() -> None:
    mixed = MixedExperts(Shape(hidden=32, size=32, kind="swigluoai", biased=True), 1)
    gate_up, down = (coded(stack, "int8") for stack in (mixed.gate_up, mixed.down))
    mixed.gate_up, mixed.down = exactly(gate_up), exactly(down)
    ops = TritonOps(DEVICE, torch.float32)
    packed = ops.pack_experts(gate_up, down, mixed.biases)
    mixed.check(ops.mixture(mixed.x, ops.choose_experts(mixed.logits, Routing(2, True)), packed, kind="swigluoai"))


def test_codes_and_numbers_may_be_side_by_side() -> None:
    mixed = MixedExperts(Shape(hidden=64, size=32), 1)
    gate_up = coded(mixed.gate_up, "int4")
    mixed.gate_up = exactly(gate_up)
    ops = TritonOps(DEVICE, torch.float32)
    packed = ops.pack_experts(gate_up, mixed.down)
    mixed.check(ops.mixture(mixed.x, ops.choose_experts(mixed.logits, Routing(2, True)), packed, kind="silu"))


@pytest.mark.parametrize("code", CODES)
def test_numbers_are_those_of_the_codes_to_the_last_bit(code: Code) -> None:
    stack = coded(torch.randn(3, 10, 128, generator=torch.Generator().manual_seed(1)).to(DEVICE), code)
    assert torch.equal(numbers_of(code_stack(stack), torch.float16), exactly(stack).half())


def test_groups_without_zero_points_have_eight_for_zero_and_may_have_offsets() -> None:
    codes = torch.randint(0, 16, (12, 64), dtype=torch.uint8, device=DEVICE)
    weight = QuantizedWeight("int4", codes, torch.rand(12, 2, device=DEVICE))
    assert torch.equal(
        numbers_of(code_stack(QuantizedStack(weight, 3)), torch.float32), exactly(QuantizedStack(weight, 3))
    )
    offset = QuantizedStack(weight._replace(offsets=torch.rand(12, 2).to(DEVICE)), 3)
    # A GPU multiplies and adds at once.
    assert torch.allclose(numbers_of(code_stack(offset), torch.float32), exactly(offset), rtol=0, atol=2e-6)
