"""The native linear layers against float64, and the same to the last bit in every batch."""

from __future__ import annotations

import pytest
import torch

from services.worker.ops.native.build import Level, runnable_levels
from tests.support.worker.native_batches import native, random

ROWS = (1, 2, 3, 5, 6, 7, 12, 16, 17, 63, 64, 97, 130)
SHAPES = ((64, 48), (768, 256), (100, 80), (33, 31), (1, 2), (192, 2050), (17, 1025))
"""(outputs, inputs): whole groups and ragged ones, one block of steps and several, odd numbers of inputs."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "inputs"), SHAPES)
def test_equals_float64_for_any_number_of_rows(dtype: torch.dtype, out: int, inputs: int) -> None:
    _check(dtype, out, inputs, None, ROWS)


@pytest.mark.parametrize("level", runnable_levels())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_level_of_instructions_computes_the_same_function(level: Level, dtype: torch.dtype) -> None:
    _check(dtype, 100, 1100, level, (1, 4, 17))


def _check(dtype: torch.dtype, out: int, inputs: int, level: Level | None, counts: tuple[int, ...]) -> None:
    ops = native(dtype, level=level)
    weight, bias = random(out, inputs, seed=1, dtype=dtype), random(out, seed=2, dtype=dtype)
    for bias_or_none in (bias, None):
        packed = ops.pack_linear(weight, bias_or_none)
        for count in counts:
            x = random(count, inputs, seed=count, dtype=ops.dtype)
            expected = x.double() @ weight.double().T + (0 if bias_or_none is None else bias.double())
            torch.testing.assert_close(ops.linear(x, packed).double(), expected, rtol=1e-4, atol=1e-5 * inputs**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_alone_equals_the_same_row_in_any_batch_bit_for_bit(dtype: torch.dtype) -> None:
    ops = native(dtype)
    packed = ops.pack_linear(random(200, 1200, seed=1, dtype=dtype), random(200, seed=2, dtype=dtype))
    x = random(200, 1200, dtype=dtype)
    alone = torch.cat([ops.linear(x[row : row + 1], packed) for row in range(len(x))])
    for count in (2, 5, 17, 64, 200):
        assert torch.equal(ops.linear(x[:count], packed), alone[:count])
        assert torch.equal(ops.linear(x[-count:], packed), alone[-count:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    weight, x = random(300, 700, seed=1, dtype=dtype), random(37, 700, dtype=dtype)
    results = []
    for threads in (1, 2, 3):
        ops = native(dtype, threads)
        results.append(ops.linear(x, ops.pack_linear(weight, None)))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_takes_what_any_operation_gives() -> None:
    """A float32 input of a bf16 model is rounded, a bf16 input of a float32 model widened."""
    x = random(9, 64)
    for dtype, given in ((torch.bfloat16, x), (torch.float32, x.bfloat16())):
        ops = native(dtype)
        packed = ops.pack_linear(random(70, 64, seed=1), None)
        assert torch.equal(ops.linear(given, packed), ops.linear(given.to(dtype), packed))


def test_what_is_packed_exactly_is_rounded_in_no_model() -> None:
    ops, weight, x = native(torch.bfloat16), random(24, 1100, seed=1), random(37, 1100)
    product = ops.linear(x, packed := ops.pack_exactly(weight))
    torch.testing.assert_close(product.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)
    assert torch.equal(torch.cat([ops.linear(row.unsqueeze(0), packed) for row in x]), product)
    of_normed = ops.linear(x.bfloat16(), ops.pack_exactly(weight, normed=True))
    assert torch.equal(of_normed, ops.linear(x.bfloat16(), packed))
    # What is bf16 in any case is multiplied as that.
    halves = ops.pack_exactly(weight.bfloat16().float(), normed=True)
    assert torch.equal(ops.linear(x.bfloat16(), halves), ops.linear(x.bfloat16(), ops.pack_linear(weight, None)))
