"""Blocks from a device's memory to an arena and back: measured by the worker, whose code does it."""

from __future__ import annotations

from services.bench.core.kv_rates import Missing, Moved
from services.bench.kv.blocks import KvShape

MODULE = "services.worker.kv_bench"
SAVE, LOAD = "save", "load"


def measure(shape: KvShape, rounds: int, device: str) -> list[Moved | Missing]:
    """Not to be had until the worker has a benchmark of its copies."""
    return [Missing(name, f"{MODULE} is not there") for name in (SAVE, LOAD)]
