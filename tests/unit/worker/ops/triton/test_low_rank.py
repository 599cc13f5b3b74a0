"""Low-rank products of many adapters, as Triton kernels, against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux only")

from services.worker.ops.low_rank import LowRankShape
from services.worker.ops.triton.low_rank import SPLIT_INPUTS, TILE_ROWS
from services.worker.ops.triton_ops import TritonOps
from tests.support.kernels.kernel_device import DEVICE
from tests.support.kernels.low_rank_reference import Ranks, adapters, expected, fill, rows_of

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 4e-2}
"""The interpreter cuts the digits of bfloat16 off."""
QKV = LowRankShape(4, 70, 80, (96, 32, 33))
"""Outputs, inputs and ranks that fill no block."""
MIXED: Ranks = ((8, 8, 8), (0, 16, 0), (1, 33, 70), (64, 0, 7))
SLOTS = (0, -1, 1, 2, 3, 0, 2, -1, 1, 3, 0)


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def check(shape: LowRankShape, ranks: Ranks, slots: tuple[int, ...], dtype: torch.dtype) -> None:
    products, parts = TritonOps(DEVICE, dtype).low_rank_products(shape), adapters(shape, ranks, dtype)
    fill(products, parts, DEVICE)
    x = drawn(len(slots), shape.inputs, seed=1).to(dtype)
    product = drawn(len(slots), sum(shape.outputs), seed=2).to(dtype)
    wanted = expected(shape, product, x, parts, slots)
    products.add(product, x, rows_of(slots, DEVICE))
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(product.double().cpu(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_of_several_adapters_of_different_ranks_and_parts(dtype: torch.dtype) -> None:
    check(QKV, MIXED, SLOTS, dtype)


@pytest.mark.parametrize("max_rank", [8, 64, 256])
def test_one_part_of_any_rank_and_more_rows_than_a_tile(max_rank: int) -> None:
    shape = LowRankShape(2, max_rank, 48, (70,))
    slots = tuple(row % 3 - 1 for row in range(4 * TILE_ROWS))
    check(shape, ((max_rank,), (5,)), slots, torch.float32)


def test_inputs_of_several_splits_and_two_parts() -> None:
    check(LowRankShape(2, 16, 2 * SPLIT_INPUTS + 40, (64, 64)), ((16, 9), (4, 4)), (1, 0, 1), torch.float32)


def test_what_is_cleared_adds_nothing() -> None:
    products, parts = TritonOps(DEVICE, torch.float32).low_rank_products(QKV), adapters(QKV, MIXED, torch.float32)
    fill(products, parts, DEVICE)
    products.clear(0)
    x, product = drawn(2, QKV.inputs, seed=1), drawn(2, 161, seed=2)
    before = product.clone()
    products.add(product, x, rows_of((0, 3), DEVICE))
    wanted = expected(QKV, before, x, parts, (-1, 3))
    torch.testing.assert_close(product.double().cpu(), wanted, rtol=1e-4, atol=1e-4)
