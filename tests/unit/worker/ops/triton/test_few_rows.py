"""Products of few rows by Triton's kernels, interpreted where there is no GPU, against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux only")

from services.worker.ops.activation import LimitedActivation
from services.worker.ops.gpu import HOPPER, generation
from services.worker.ops.interface import Activation
from services.worker.ops.torch_ops import TorchOps
from services.worker.ops.triton.few_rows import MAX_ROWS, few_rows_linear, multiplies, rows_tile
from tests.support.kernels.kernel_device import DEVICE
from tests.support.worker.native_batches import random

ROUNDING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}
"""Triton's interpreter cuts bfloat16 off, where a GPU rounds it."""


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize(("outputs", "inputs", "bias"), [(256, 1024, False), (130, 200, True), (70, 1100, True)])
def test_products_equal_float64_within_a_rounding(
    outputs: int, inputs: int, bias: bool, rows: int, dtype: torch.dtype
) -> None:
    x, weight, added = (
        random(*shape, seed=seed, dtype=dtype).to(DEVICE)
        for seed, shape in enumerate([(rows, inputs), (outputs, inputs), (outputs,)])
    )
    found = few_rows_linear(x, weight, added if bias else None)
    wanted = x.double() @ weight.double().T + (added.double() if bias else 0.0)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=1.1 * ROUNDING[dtype], atol=1e-3)


@pytest.mark.parametrize(
    "kind", ["silu", "gelu_tanh", "swigluoai", "silu_limited", LimitedActivation("swiglustep", 1.5)]
)
@pytest.mark.parametrize("rows", [1, 5])
def test_gates_and_ups_are_activated_where_they_are_multiplied(rows: int, kind: Activation) -> None:
    width, inputs = 70, 200
    x, weight, bias = (
        random(*shape, seed=seed, dtype=torch.float16).to(DEVICE)
        for seed, shape in enumerate([(rows, inputs), (2 * width, inputs), (2 * width,)])
    )
    found = few_rows_linear(x, weight, bias, kind)
    sums = x.double() @ weight.double().T + bias.double()
    wanted = TorchOps(x.device, torch.float64).gated_act(sums, kind)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.double(), wanted, rtol=2.0**-8, atol=2e-3 * float(wanted.abs().max()))


def test_many_rows_and_float32_are_left_to_others() -> None:
    weight = torch.zeros(8, 16, dtype=torch.bfloat16, device=DEVICE)
    assert multiplies(weight.new_zeros(MAX_ROWS, 16), weight) == (generation(DEVICE) == HOPPER)
    assert not multiplies(weight.new_zeros(MAX_ROWS + 1, 16), weight)
    assert not multiplies(torch.zeros(1, 16, device=DEVICE), weight.float())
    assert not multiplies(weight.new_zeros(1, 8), weight.T[:, :8])


def test_a_row_does_not_depend_on_those_beside_it() -> None:
    """From two rows on: one alone is added up in another order."""
    x, weight = (random(*shape, seed=1, dtype=torch.bfloat16).to(DEVICE) for shape in ((16, 300), (90, 300)))
    together = few_rows_linear(x, weight, None)
    assert torch.equal(few_rows_linear(x[3:5], weight, None), together[3:5])


def test_tiles_fit_into_hoppers_shared_memory() -> None:
    for outputs, inputs in ((4096, 4096), (28672, 4096), (4096, 14336), (1024, 3072), (128256, 4096)):
        tile = rows_tile(MAX_ROWS, outputs, inputs)
        assert tile.num_stages * (tile.rows + tile.columns) * tile.depth * 2 <= 227 * 1024
