"""Native low-rank products of many adapters against float64, and the same to the last bit in every batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.worker.ops.low_rank import LowRankProducts, LowRankShape
from services.worker.ops.native.build import Level, runnable_levels
from services.worker.ops.torch_ops import TorchOps
from tests.support.kernels.low_rank_reference import Ranks, adapters, expected, fill, rows_of
from tests.support.worker.native_batches import CPU, native, random

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = tuple(TOLERANCE)
QKV = LowRankShape(4, 256, 200, (96, 32, 33))
"""Outputs that fill no group of 64, nor of 16."""
MIXED: Ranks = ((8, 8, 8), (0, 16, 0), (1, 33, 256), (256, 0, 7))
SLOTS = (0, -1, 1, 2, 3, 0, 2, -1, 1, 3, 0)


def added(products: LowRankProducts, x: Tensor, slots: tuple[int, ...], product: Tensor) -> Tensor:
    result = product.clone()
    products.add(result, x, rows_of(slots, CPU))
    return result


def check(
    products: LowRankProducts, shape: LowRankShape, ranks: Ranks, slots: tuple[int, ...], dtype: torch.dtype
) -> None:
    parts = adapters(shape, ranks, dtype)
    fill(products, parts, CPU)
    x = random(len(slots), shape.inputs, seed=1, dtype=dtype)
    product = random(len(slots), sum(shape.outputs), seed=2)
    wanted = expected(shape, product, x, parts, slots)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(added(products, x, slots, product).double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_several_adapters_of_different_ranks_and_parts(dtype: torch.dtype) -> None:
    check(native(dtype).low_rank_products(QKV), QKV, MIXED, SLOTS, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pytorch_computes_the_same(dtype: torch.dtype) -> None:
    check(TorchOps(CPU, dtype).low_rank_products(QKV), QKV, MIXED, SLOTS, dtype)


@pytest.mark.parametrize("rank", [1, 8, 17, 64, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_and_inputs_that_fill_no_step(dtype: torch.dtype, rank: int) -> None:
    shape = LowRankShape(2, 256, 77, (130,))
    check(native(dtype).low_rank_products(shape), shape, ((rank,), (8,)), (1, 0, -1), dtype)


@pytest.mark.parametrize("level", runnable_levels())
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_level_of_instructions_computes_the_same_function(level: Level, dtype: torch.dtype) -> None:
    check(native(dtype, level=level).low_rank_products(QKV), QKV, MIXED, SLOTS, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_of_the_other_type_are_converted(dtype: torch.dtype) -> None:
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    products, parts = native(dtype).low_rank_products(QKV), adapters(QKV, MIXED, dtype)
    fill(products, parts, CPU)
    x, product = random(len(SLOTS), QKV.inputs, seed=1, dtype=other), random(len(SLOTS), 161, seed=2)
    wanted = expected(QKV, product, x.to(dtype), parts, SLOTS)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(added(products, x, SLOTS, product).double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_as_in_any_batch_on_any_number_of_threads(
    dtype: torch.dtype, threads: int
) -> None:
    shape = LowRankShape(4, 256, 700, (640, 64))
    parts = adapters(shape, ((16, 16), (8, 0), (256, 64), (33, 1)), dtype)
    alone, together = native(dtype, 2).low_rank_products(shape), native(dtype, threads).low_rank_products(shape)
    for products in (alone, together):
        fill(products, parts, CPU)
    slots = tuple((0, 1, 2, 3, -1, 2, 2)[row % 7] for row in range(150))  # more rows of a slot than a tile has
    x, product = random(150, 700, seed=1, dtype=dtype), random(150, 704, seed=2)
    every = added(together, x, slots, product)
    for row in range(14):
        assert torch.equal(added(alone, x[row : row + 1], slots[row : row + 1], product[row : row + 1])[0], every[row])


def test_what_is_cleared_or_replaced_adds_nothing() -> None:
    products, parts = native(torch.float32).low_rank_products(QKV), adapters(QKV, MIXED, torch.float32)
    fill(products, parts, CPU)
    products.put(0, parts[1])
    products.clear(2)
    x, product, slots = random(2, QKV.inputs, seed=1), random(2, 161, seed=2), (0, 2)
    result = added(products, x, slots, product)
    torch.testing.assert_close(result.double(), expected(QKV, product, x, [parts[1]], (0, -1)), rtol=1e-5, atol=1e-5)
    assert torch.equal(result[1], product[1])
