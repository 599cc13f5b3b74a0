"""Decodes into the memory of a captured batch, by one kernel: the same as by copies."""

from __future__ import annotations

import pytest
import torch

from services.worker.ops.triton.decode_inputs import DecodeRows, pad_decodes
from tests.support.kernels.kernel_device import DEVICE

MOST, WIDTH = 6, 300
SLOT, CONTEXT = -1, 0


def numbered(rows: int, width: int, first: int) -> DecodeRows:
    """Each number occurs once."""
    sizes = [rows, rows, rows, rows, rows * width]
    parts = torch.arange(first, first + sum(sizes), dtype=torch.int32, device=DEVICE).split(sizes)
    return DecodeRows(parts[0], parts[1], parts[2], parts[3], parts[4].view(rows, width))


@pytest.mark.parametrize(("count", "size", "width"), [(1, 1, 1), (3, 4, 7), (4, 4, 257), (5, 6, 300), (1, 6, 256)])
def test_rows_are_copied_and_the_rest_is_padding(count: int, size: int, width: int) -> None:
    rows, into, before = numbered(count, width, 10_000), numbered(MOST, WIDTH, 0), numbered(MOST, WIDTH, 0)
    pad_decodes(rows, into, size, slot=SLOT, context=CONTEXT)
    for field, padding in zip(DecodeRows._fields[:4], (None, None, SLOT, CONTEXT), strict=True):
        expected = getattr(before, field)
        expected[:count] = getattr(rows, field)
        if padding is not None:
            expected[count:size] = padding
        assert torch.equal(getattr(into, field), expected), field
    before.block_tables[:count, :width] = rows.block_tables
    assert torch.equal(into.block_tables, before.block_tables)
