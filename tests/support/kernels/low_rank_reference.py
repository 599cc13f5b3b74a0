"""Adapters of one matrix for tests of low-rank products, and what these should be, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.worker.ops.low_rank import AdapterRows, AdapterSpan, LowRankPart, LowRankProducts, LowRankShape

Ranks = Sequence[tuple[int, ...]]
"""Of each slot's parts; 0: it has none."""


def adapters(shape: LowRankShape, ranks: Ranks, dtype: torch.dtype) -> list[list[LowRankPart | None]]:
    """Random ones, whose products are of the size of their inputs."""
    generator = torch.Generator().manual_seed(5)

    def drawn(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(dtype)

    return [
        [
            LowRankPart(drawn(rank, shape.inputs), drawn(count, rank)) if rank else None
            for rank, count in zip(of_slot, shape.outputs, strict=True)
        ]
        for of_slot in ranks
    ]


def fill(products: LowRankProducts, parts: list[list[LowRankPart | None]], device: torch.device) -> None:
    """Puts each adapter into its slot."""
    for slot, of_slot in enumerate(parts):
        products.put(
            slot, [None if part is None else LowRankPart(part.a.to(device), part.b.to(device)) for part in of_slot]
        )


def rows_of(slots: Sequence[int], device: torch.device) -> AdapterRows:
    """Rows with these slots, -1 for none."""
    numbers = np.array(slots, dtype=np.int32)
    order = [int(row) for row in np.argsort(numbers, kind="stable") if numbers[row] >= 0]
    spans, first = [], 0
    for slot in sorted({each for each in slots if each >= 0}):
        end = first + int((numbers == slot).sum())
        spans.append(AdapterSpan(slot, first, end))
        first = end
    in_order = torch.tensor(order, dtype=torch.int32, device=device)
    return AdapterRows(torch.from_numpy(numbers).to(device), in_order, tuple(spans))


def expected(
    shape: LowRankShape, product: Tensor, x: Tensor, parts: list[list[LowRankPart | None]], slots: Sequence[int]
) -> Tensor:
    """`product` with what each row's adapter adds, row by row."""
    result = product.double().cpu().clone()
    for row, slot in enumerate(slots):
        first = 0
        for part, count in zip(parts[slot] if slot >= 0 else (), shape.outputs, strict=slot >= 0):
            if part is not None:
                result[row, first : first + count] += part.b.double() @ (part.a.double() @ x[row].double().cpu())
            first += count
    return result
