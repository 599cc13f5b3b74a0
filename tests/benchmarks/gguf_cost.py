"""What the products of a decode step cost with the codes of GGUF's types, beside bf16, for Llama of 110 M parameters.

    python -m tests.benchmarks.gguf_cost

Random codes, native operations and one thread, in one process, by turns; the matrices of attention and MLPs, without
the head, which are numbers. Processor time, so that what else runs on the machine matters little; it is not without
influence, as all share the memory's bandwidth.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

from services.worker.ops.interface import PackedLinear
from services.worker.ops.native.native_ops import NativeOps
from services.worker.ops.quantized import QuantizedWeight
from tests.benchmarks.library_cost import SHAPE

ROWS = (1, 4, 16, 64)
ROUNDS, CALLS = 5, 6
TYPES = {
    "BF16": None,
    "Q4_0": ("int4", False, 32),
    "Q4_K": ("int4", True, 32),
    "Q8_0": ("int8", False, 32),
    "Q5_K": ("int8", True, 32),
    "Q6_K": ("int8", False, 16),
    "Q3_K": ("int4", False, 16),
    "Q2_K": ("int4", True, 16),
}
"""Codes, whether their groups have an offset, and the inputs of one."""


def shapes() -> list[tuple[int, int]]:
    """(outputs, inputs) of one layer's matrices, as they are packed together."""
    hidden, size, heads = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["num_attention_heads"]
    kv = SHAPE["num_key_value_heads"] * hidden // heads
    return [(hidden + 2 * kv, hidden), (hidden, hidden), (2 * size, hidden), (hidden, size)]


def packed(ops: NativeOps, kind: str, out: int, inputs: int) -> PackedLinear:
    """A matrix as a file of the type `kind` gives it."""
    made = TYPES[kind]
    if made is None:
        return ops.pack_linear(torch.randn(out, inputs, dtype=torch.bfloat16), None)
    code, offset, group = made
    codes = torch.randint(0, 16, (out, inputs), dtype=torch.uint8)
    scales = torch.rand(out, inputs // group) / 100
    return ops.pack_quantized(QuantizedWeight(code, codes, scales, offsets=-scales if offset else None), None)


def milliseconds(ops: NativeOps, layers: list[list[PackedLinear]], rows: dict[int, Tensor]) -> float:
    """The least of some calls, each of all layers' products."""
    took = []
    for _ in range(CALLS):
        started = time.process_time()
        for matrices in layers:
            for matrix, (_, inputs) in zip(matrices, shapes(), strict=True):
                ops.linear(rows[inputs], matrix)
        took.append(time.process_time() - started)
    return min(took) * 1e3


def main() -> None:
    """Prints a table: milliseconds, medians of rounds, and how many times as fast as bf16."""
    ops = NativeOps(torch.device("cpu"), torch.bfloat16, threads=1)
    models = {
        kind: [[packed(ops, kind, *shape) for shape in shapes()] for _ in range(SHAPE["num_hidden_layers"])]
        for kind in TYPES
    }
    print("| rows |" + "|".join(f" {kind} " for kind in TYPES) + "|", flush=True)
    for count in ROWS:
        rows = {inputs: torch.randn(count, inputs, dtype=torch.bfloat16) for _, inputs in shapes()}
        took: dict[str, list[float]] = {kind: [] for kind in TYPES}
        for _ in range(ROUNDS):
            for kind, layers in models.items():
                took[kind].append(milliseconds(ops, layers, rows))
        median = {kind: statistics.median(each) for kind, each in took.items()}
        cells = (f" {each:.2f} ms, {median['BF16'] / each:.2f} × " for each in median.values())
        print(f"| {count} |" + "|".join(cells) + "|", flush=True)


if __name__ == "__main__":
    main()
