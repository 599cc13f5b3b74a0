"""What a forked process allocates lies in pages of its own, not between what it shares."""

from __future__ import annotations

import subprocess
import sys

import pytest

SIZES = (24, 40, 104, 250, 600, 1000, 3000, 20_000)
PROGRAM = f"""
import ctypes
from shared.machine.heap import _heap, keep_forks_apart
heap = _heap()
kept, freed = [], []
for turn in range(300):
    for size in {SIZES}:
        freed.append(heap.malloc(size))
        kept.append(heap.malloc(size))
for address in freed:
    heap.free(address)
reused = [heap.malloc(size) < max(kept) for size in {SIZES}]
keep_forks_apart()
print(all(reused), *(heap.malloc(size) < max(kept) for size in {SIZES} for _ in range(20)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_no_hole_between_allocations_is_used_again() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", *["False"] * 20 * len(SIZES)]
