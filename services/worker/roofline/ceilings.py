"""What the device could do at best: moving memory, and multiplying matrices.

Memory: a large copy between two places of the device, which reads and writes each byte once; on a CPU also reading
alone, by the native kernels' own probe where they can be had, as a CPU fetches what it is about to overwrite and
decoding only reads. Matrices: the best of square products of several sizes; on a CPU also the registers' peak.
"""

from __future__ import annotations

import torch

from services.worker.native.kernels import Kernels
from services.worker.native.native_ops import NativeOps
from services.worker.ops import OpsUnavailable
from services.worker.roofline.findings import Ceilings
from services.worker.roofline.stopwatch import Stopwatch

_COPIED_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}
"""Of each of the two places: far more than any cache holds."""
_SQUARES = {"cpu": (512, 1024, 2048), "cuda": (2048, 4096, 8192, 16384)}
_PROBED_STEPS = 200_000


def measure_ceilings(watch: Stopwatch, device: torch.device, dtype: torch.dtype, budget: float) -> Ceilings:
    """Takes about `budget` seconds."""
    squares = _SQUARES[device.type]
    memory = {"copy": _copying(watch, device, budget / 2)}
    matrix = {"matmul": max(_multiplying(watch, device, dtype, size, budget / 2 / len(squares)) for size in squares)}
    native = _native(device, dtype)
    if native is not None:
        memory["read"] = _reading(watch, native.kernels, budget / 4)
        matrix["registers"] = _registers(watch, native, budget / 8)
    return Ceilings(memory, matrix)


def _copying(watch: Stopwatch, device: torch.device, budget: float) -> float:
    size = _copied_bytes(device)
    source, target = (torch.zeros(size // 4, dtype=torch.float32, device=device).fill_(1) for _ in range(2))
    return 2 * size / watch.timed(lambda: target.copy_(source), budget).best


def _copied_bytes(device: torch.device) -> int:
    """A GPU that is nearly full copies less."""
    wished = _COPIED_BYTES[device.type]
    return wished if device.type == "cpu" else min(wished, int(torch.cuda.mem_get_info(device)[0]) // 4)


def _multiplying(watch: Stopwatch, device: torch.device, dtype: torch.dtype, size: int, budget: float) -> float:
    # Random numbers: a GPU that multiplies zeros takes less power, and so may run faster than it ever does at work.
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty(size, size, dtype=dtype, device=device)
    return 2 * size**3 / watch.timed(lambda: torch.mm(one, other, out=product), budget).best


def _native(device: torch.device, dtype: torch.dtype) -> NativeOps | None:
    try:
        return NativeOps(device, dtype)
    except OpsUnavailable:
        return None


def _reading(watch: Stopwatch, kernels: Kernels, budget: float) -> float:
    memory = torch.ones(_COPIED_BYTES["cpu"], dtype=torch.uint8)
    probe = kernels.library.baton_probe_reading
    return len(memory) / watch.timed(lambda: probe(kernels.pool, memory.data_ptr(), len(memory)), budget).best


def _registers(watch: Stopwatch, native: NativeOps, budget: float) -> float:
    probe, pool = native.kernels.library.baton_probe_multiplying, native.kernels.pool
    operations = probe(pool, native.number, _PROBED_STEPS)
    return float(operations / watch.timed(lambda: probe(pool, native.number, _PROBED_STEPS), budget).best)
