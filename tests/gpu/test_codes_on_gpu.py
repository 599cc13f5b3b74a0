"""Weights that stay codes on a real GPU: products at the sizes of served models, and whole models beside a CPU's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is for Linux only")

from services.worker.executor.torch_backend import create_backend
from services.worker.ops.quantized import SCHEMES, Code, Scheme, multiply_rounded, quantize, round_rows
from services.worker.ops.triton_ops import TritonOps
from tests.support.kernels.kernel_device import DEVICE
from tests.support.models.rounded_models import ROUNDED_INPUTS, SIZES, assert_same_steps
from tests.support.models.tiny_models import VOCABULARY, make_model
from tests.support.worker.plan_driver import Driver
from tests.support.worker.recorded_logits import last_logits, record_logits
from tests.support.worker.tiny_backend import tiny_settings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

CODES: tuple[Code, ...] = get_args(Code)
PROMPTS = [
    [(11 * place + 5 * length) % (VOCABULARY - 3) + 3 for place in range(length)] for length in (1, 7, 20, 40, 75)
]
"""The longest is of more rows than any tile that reads codes."""
OUTPUT = 8


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 64, 65, 200, 1000])
@pytest.mark.parametrize("code", CODES)
def test_products_equal_float64_within_a_rounding(code: Code, rows: int) -> None:
    ops = TritonOps(DEVICE, torch.bfloat16)
    for outputs, inputs in ((6144, 4096), (4096, 14336)):
        weight = quantize(drawn(outputs, inputs, seed=1), code)
        x, bias = drawn(rows, inputs, seed=2).bfloat16(), drawn(outputs, seed=3).bfloat16()
        found = ops.linear(x, ops.pack_quantized(weight, bias)).double()
        exact = x.double() @ weight.dequantized(torch.float64).T + bias.double()
        # Numbers that are made first for many rows are rounded to bfloat16, each by itself.
        assert (found - exact).norm() < 2.0**-8 * exact.norm()
        assert (found - exact).abs().max() < 2.0**-6 * exact.abs().max()


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 200, 1000])
def test_rounded_rows_have_the_bits_of_pytorchs_operations(rows: int) -> None:
    ops = TritonOps(DEVICE, torch.bfloat16)
    for outputs, inputs in ((6144, 4096), (4096, 14336)):
        weight = quantize(drawn(outputs, inputs, seed=1), "w8a8_int8")
        x = drawn(rows, inputs, seed=2).bfloat16()
        assert torch.equal(ops.linear(x, ops.pack_quantized(weight, None)), multiply_rounded(x, weight, None))


@pytest.mark.parametrize("rows", [1, 4, 16, 17, 64, 65, 200, 1000])
def test_products_of_rows_in_fp8_equal_float64_within_what_tensor_cores_lose(rows: int) -> None:
    """Of bits of a sum, and its rounding; rows are rounded to the same bits as PyTorch rounds them."""
    ops = TritonOps(DEVICE, torch.bfloat16)
    for outputs, inputs in ((6144, 4096), (4096, 14336)):
        weight = quantize(drawn(outputs, inputs, seed=1), "w8a8_fp8")
        x, bias = drawn(rows, inputs, seed=2).bfloat16(), drawn(outputs, seed=3).bfloat16()
        found = ops.linear(x, ops.pack_quantized(weight, bias)).double()
        each = round_rows(x, "fp8")
        exact = (each.codes.double() * each.scales) @ weight.dequantized(torch.float64).T + bias.double()
        assert (found - exact).norm() < 2.0**-8 * exact.norm()


def backend(path: Path, device: str, scheme: Scheme, **different: Any) -> Any:
    ops = "torch" if device == "cpu" else "triton"
    return create_backend(
        tiny_settings(path, device=device, dtype="float32", ops=ops, quantization=scheme, **different)
    )


def generated(runner: Any) -> list[list[int]]:
    driver = Driver(runner, budget=96)
    sequences = [driver.add(prompt, OUTPUT) for prompt in PROMPTS]
    driver.run()
    return [sequence.output for sequence in sequences]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_quantised_models_compute_what_a_cpu_does(
    family: str, scheme: Scheme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured and launched; where activations are rounded, the last bit of a sum may take one to the next step."""
    make_model(family, tmp_path, **SIZES)
    recorded = record_logits(monkeypatch)
    on_cpu = backend(tmp_path, "cpu", scheme)
    expected = [last_logits(on_cpu, prompt, recorded) for prompt in PROMPTS]
    tokens = generated(on_cpu)
    for eager in (False, True):
        on_gpu = backend(tmp_path, "cuda:0", scheme, enforce_eager=eager)
        found = [last_logits(on_gpu, prompt, recorded).cpu() for prompt in PROMPTS]
        if scheme in ROUNDED_INPUTS:
            assert_same_steps(found, expected)
        else:
            assert max(float((ours - each).abs().max()) for ours, each in zip(found, expected, strict=True)) < 1e-3
            assert generated(on_gpu) == tokens
