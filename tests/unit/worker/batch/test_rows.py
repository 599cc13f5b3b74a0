from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from services.worker.batch.rows import Int32s, untouched_zeros

PAGE = 4096
ROWS, WIDTH = 256, 2048
PRESENT = 1 << 63
"""A bit of each entry of /proc/self/pagemap (proc_pid_pagemap(5))."""


def touched_pages(table: Int32s) -> int:
    first = table.ctypes.data // PAGE
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(first * 8)
        entries = np.frombuffer(pagemap.read((table.nbytes // PAGE) * 8), dtype=np.uint64)
    return int(np.count_nonzero(entries & np.uint64(PRESENT)))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_zeros_take_no_memory_until_they_are_written_to_whatever_malloc_keeps() -> None:
    for _ in range(2):  # once so much was freed, malloc takes such sizes out of what it keeps, and writes the zeros
        np.ones((ROWS, WIDTH), dtype=np.int32)
    table = untouched_zeros(ROWS, WIDTH)
    assert touched_pages(table) == 0
    table[3, :10] = 7
    assert touched_pages(table) == 1
    assert table.sum() == 70, "the rest are zeros"


def test_a_table_may_be_empty() -> None:
    assert untouched_zeros(0, 5).shape == (0, 5)
