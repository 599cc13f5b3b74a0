"""What products cost in tiles (AMX), by AVX-512 and by oneDNN, by shape and number of rows; for a processor with AMX.

    python -m tests.benchmarks.tile_products [--threads N]

Weights are read from memory: each call has a matrix of its own, more together than caches hold. All three compute the
same product in one process, by turns; the best of rounds, in microseconds by the wall. oneDNN is PyTorch's, with
weights in its own layout, as with `ops = torch`; Baton multiplies no codes by it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from services.worker.ops.interface import Ops, OpsUnavailable, PackedLinear
from services.worker.ops.native.build import Level
from services.worker.ops.native.native_ops import NativeOps
from services.worker.ops.quantized import Scheme, quantize
from services.worker.ops.torch_ops import TorchOps

CPU = torch.device("cpu")
SHAPES = {"110 M: qkv": (1280, 768), "gate_up": (4096, 768), "down": (768, 2048), "8 B: down": (4096, 14336)}
"""(outputs, inputs) of Llama's shapes."""
ROWS = (1, 4, 16, 17, 32, 64, 128, 512)
ROUNDS, CACHES = 7, 256 << 20
SCHEMES: tuple[Scheme, ...] = ("int8", "w8a8_int8", "int4")

Pack = Callable[[Ops, Tensor], PackedLinear]


def microseconds(ops: Ops, matrices: list[PackedLinear], x: Tensor) -> float:
    """Of one product, on the average of all matrices."""
    started = time.perf_counter()
    for matrix in matrices:
        ops.linear(x, matrix)
    return (time.perf_counter() - started) / len(matrices) * 1e6


def compare(ways: Mapping[str, Ops], pack: Pack, shape: tuple[int, int]) -> None:
    """Prints a line for each number of rows."""
    weight = torch.randn(shape).bfloat16()
    copies = max(1, min(32, CACHES // (weight.numel() * 2)))
    packed = {name: [pack(ops, weight) for _ in range(copies)] for name, ops in ways.items()}
    for rows in ROWS:
        x = torch.randn(rows, shape[1]).bfloat16()
        best = {name: float("inf") for name in ways}
        for _ in range(ROUNDS):
            for name, ops in ways.items():
                best[name] = min(best[name], microseconds(ops, packed[name], x))
        print(f"{rows:6}" + "".join(f" {took:14.1f}" for took in best.values()), flush=True)


def native(level: Level, threads: int) -> NativeOps:
    """Raises OpsUnavailable."""
    return NativeOps(CPU, torch.bfloat16, threads=threads, level=level)


def main() -> None:
    """Prints the tables, or why there are none."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    try:
        ours: dict[str, Ops] = {"amx": native("amx", threads), "avx512-bf16": native("avx512-bf16", threads)}
    except OpsUnavailable as reason:
        raise SystemExit(f"nothing to compare: {reason}") from None
    with_onednn = {**ours, "oneDNN": TorchOps(CPU, torch.bfloat16)}
    for name, shape in SHAPES.items():
        print(f"{name} {shape}, bfloat16\n  rows" + "".join(f" {way:>14}" for way in with_onednn))
        compare(with_onednn, lambda ops, weight: ops.pack_linear(weight, None), shape)
        for scheme in SCHEMES:
            print(f"{name} {shape}, {scheme}\n  rows" + "".join(f" {way:>14}" for way in ours))
            compare(ours, lambda ops, weight, scheme=scheme: ops.pack_quantized(quantize(weight, scheme), None), shape)  # type: ignore[misc]


if __name__ == "__main__":
    main()
