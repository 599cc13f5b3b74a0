"""The native embedding, norms and gates against float64, and the same to the last bit in every batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.worker.ops.activation import LimitedActivation
from services.worker.ops.interface import Activation
from services.worker.ops.native.build import Level, runnable_levels
from tests.support.models.expert_mixtures import exactly_gated
from tests.support.worker.native_batches import native, random

COUNTS = (1, 2, 5, 17, 130)
WIDTHS = (64, 100, 768, 7)
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", WIDTHS)
def test_rms_norm_equals_float64(dtype: torch.dtype, hidden: int) -> None:
    ops, weight = native(dtype), random(hidden, seed=1) + 1
    for count in COUNTS:
        for given in (random(count, hidden), random(count, hidden).bfloat16()):
            normed = ops.rms_norm(given, weight, 1e-5)
            assert normed.dtype == dtype
            torch.testing.assert_close(
                normed.double(), _norm(given, weight, 1e-5), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_gives_the_sum_and_its_norm(dtype: torch.dtype) -> None:
    ops, weight = native(dtype), random(100, seed=1) + 1
    x, residual = random(17, 100, seed=2), random(17, 100, seed=3)
    added = x + residual
    normed, total = ops.add_rms_norm(x, residual.clone(), weight, 1e-6)
    assert torch.equal(total, added)
    assert torch.equal(normed, ops.rms_norm(added, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kind", ["silu", "gelu_tanh", "swigluoai", "silu_limited", LimitedActivation("swiglustep", 1.5)]
)
@pytest.mark.parametrize("level", runnable_levels())
def test_gates_equal_float64(dtype: torch.dtype, kind: Activation, level: Level) -> None:
    ops = native(dtype, level=level)
    for width in WIDTHS:
        gate_up = random(5, 2 * width) * 4
        gate_up[0, 0], gate_up[1, 0] = 200.0, -200.0
        gate, up = gate_up.double().chunk(2, dim=1)
        expected = exactly_gated(gate, up, kind)
        gated = ops.gated_act(gate_up, kind).double()
        torch.testing.assert_close(gated, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("level", runnable_levels())
def test_gates_hold_at_the_bounds_of_the_exponential(level: Level) -> None:
    odd = [float("nan"), float("inf"), 87.2, 87.4, 88.1, -87.2, -87.4, -88.1, 0.0, -0.0]
    bounds = torch.tensor(odd * 2)  # as whole vectors, and as what is left behind them
    gate_up = torch.cat((bounds, torch.ones_like(bounds))).unsqueeze(0)
    expected = torch.nn.functional.silu(bounds.double()).unsqueeze(0)
    gated = native(torch.float32, level=level).gated_act(gate_up, "silu").double()
    torch.testing.assert_close(gated, expected, rtol=1e-5, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_embedding_gathers_rows_exactly(dtype: torch.dtype) -> None:
    ops, table = native(dtype), random(50, 70, dtype=dtype)
    ids = torch.tensor([3, 49, 0, 3], dtype=torch.int32)
    assert torch.equal(ops.embed(ids, table), table[ids].float())


def test_an_id_outside_of_the_vocabulary_is_refused() -> None:
    ops = native(torch.float32)
    for wrong in (50, -1):
        with pytest.raises(IndexError, match="vocabulary of 50"):
            ops.embed(torch.tensor([0, wrong], dtype=torch.int32), random(50, 8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_their_batch(dtype: torch.dtype) -> None:
    ops, weight = native(dtype), random(100, seed=1)
    x = random(64, 100)
    alone = torch.cat([ops.rms_norm(x[row : row + 1], weight, 1e-5) for row in range(len(x))])
    gated = torch.cat([ops.gated_act(x[row : row + 1], "silu") for row in range(len(x))])
    for count in (2, 5, 17, 64):
        assert torch.equal(ops.rms_norm(x[:count], weight, 1e-5), alone[:count])
        assert torch.equal(ops.gated_act(x[:count], "silu"), gated[:count])
