"""How near the kernels come to what the machine could do, and to PyTorch; ratios of figures taken in one run.

    python -m services.worker.native.bench [--dtype bfloat16] [--threads 2] [--cpu-time]

Prints for the layers of a Llama shape: weights read per second at one row against reading memory and nothing else;
operations per second at more rows against multiplying registers and nothing else; both against PyTorch; and decoding
attention against reading its keys and values. Each figure is the best of several, as other processes only ever slow
things down. On a machine that others keep busy, `--threads 1 --cpu-time` counts this process's own time.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.model.rope import PlainRope, cos_sin_table
from services.worker.native.memory import zeroed
from services.worker.native.native_ops import NativeOps
from services.worker.ops import BatchMeta, Ops
from services.worker.torch_ops import TorchOps
from shared.blocks import BLOCK_SIZE

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS = 768, 12, 4, 64, 2048, 12
SHAPES = (
    ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    (HIDDEN, HEADS * HEAD_DIM),
    (2 * MLP, HIDDEN),
    (HIDDEN, MLP),
)
"""(outputs, inputs) of a layer's linears."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
SEQUENCES = (1, 16, 64)
CONTEXT = 256
REPEATS = 15


class Stopwatch:
    """Takes the least of several times by one clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def best(self, work: Callable[[], object]) -> float:
        """Seconds that `work` takes at best."""
        work()
        return min(self._timed(work) for _ in range(REPEATS))

    def _timed(self, work: Callable[[], object]) -> float:
        begun = self._clock()
        work()
        return self._clock() - begun


class Layers:
    """The linears of all layers, so that weights come from memory as they do in a model."""

    def __init__(self, watch: Stopwatch, ops: Ops, dtype: torch.dtype) -> None:
        self.watch = watch
        self.ops, self.dtype = ops, dtype
        self.packed = [
            (inputs, ops.pack_linear(torch.randn(out, inputs).to(dtype), None))
            for _ in range(LAYERS)
            for out, inputs in SHAPES
        ]

    def seconds(self, rows: int) -> float:
        given = {inputs: torch.randn(rows, inputs).to(self.dtype) for _, inputs in SHAPES}

        def run() -> None:
            for inputs, packed in self.packed:
                self.ops.linear(given[inputs], packed)

        return self.watch.best(run)


def linears(watch: Stopwatch, native: NativeOps, portable: Ops, dtype: torch.dtype) -> None:
    weights = LAYERS * sum(out * inputs for out, inputs in SHAPES)
    memory = zeroed(weights * native.dtype.itemsize)
    memory.fill_(1)
    kernels, pool = native.kernels.library, native.kernels.pool
    reading = len(memory) / watch.best(lambda: kernels.baton_probe_reading(pool, memory.data_ptr(), len(memory)))
    steps = 200_000
    operations = kernels.baton_probe_multiplying(pool, native.number, 8)
    operations = kernels.baton_probe_multiplying(pool, native.number, steps)
    peak = operations / watch.best(lambda: kernels.baton_probe_multiplying(pool, native.number, steps))
    print(f"memory: {reading / 1e9:.1f} GB/s read; registers: {peak / 1e9:.0f} GFLOP/s")
    print(" rows       ms   GB/s  of memory  GFLOP/s  of peak  torch ms  torch / native")
    ours, theirs = Layers(watch, native, dtype), Layers(watch, portable, dtype)
    for rows in ROWS:
        seconds, reference = ours.seconds(rows), theirs.seconds(rows)
        bandwidth, rate = len(memory) / seconds, 2 * rows * weights / seconds
        print(
            f"{rows:5d} {seconds * 1e3:8.2f} {bandwidth / 1e9:6.1f} {bandwidth / reading:10.0%} {rate / 1e9:8.0f}"
            f" {rate / peak:8.0%} {reference * 1e3:9.2f} {reference / seconds:15.2f}",
            flush=True,
        )


def attention(watch: Stopwatch, native: NativeOps, portable: Ops, dtype: torch.dtype) -> None:
    print(f"{CONTEXT} tokens each, {LAYERS} layers\n decodes       ms  of memory  torch ms  torch / native")
    kernels, pool = native.kernels.library, native.kernels.pool
    for sequences in SEQUENCES:
        blocks = sequences * CONTEXT // BLOCK_SIZE
        keys_and_values = LAYERS * blocks * native.kv_block_bytes(KV_HEADS, HEAD_DIM)
        memory = zeroed(keys_and_values)
        memory.fill_(1)
        reading = watch.best(lambda: kernels.baton_probe_reading(pool, memory.data_ptr(), len(memory)))  # noqa: B023
        seconds, reference = (_attention_seconds(watch, ops, dtype, sequences) for ops in (native, portable))
        print(
            f"{sequences:8d} {seconds * 1e3:8.2f} {reading / seconds:10.0%} {reference * 1e3:9.2f}"
            f" {reference / seconds:15.2f}",
            flush=True,
        )


def _attention_seconds(watch: Stopwatch, ops: Ops, dtype: torch.dtype, sequences: int) -> float:
    """Rotation, storing and attention of one new token for each sequence, in all layers."""
    meta = _decodes(sequences)
    caches = [ops.allocate_kv(sequences * CONTEXT // BLOCK_SIZE, KV_HEADS, HEAD_DIM) for _ in range(LAYERS)]
    for keys, values in caches:
        keys.normal_(), values.normal_()
    cos_sin = cos_sin_table(PlainRope(10000.0), HEAD_DIM, CONTEXT)
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    qkv = ops.linear(torch.randn(sequences, 16).to(dtype), ops.pack_linear(torch.randn(width, 16).to(dtype), None))

    def run() -> None:
        for keys, values in caches:
            queries = ops.rope_and_store(
                qkv.clone(), meta, cos_sin, keys, values, heads=HEADS, q_norm=None, k_norm=None, eps=1e-6
            )
            ops.paged_attention(queries, keys, values, meta, scale=0.125, window=None, softcap=None)

    return watch.best(run)


def _decodes(sequences: int) -> BatchMeta:
    width = CONTEXT // BLOCK_SIZE
    tables = torch.randperm(sequences * width).to(torch.int32).view(sequences, width)
    return BatchMeta(
        query_starts=_counting(sequences + 1),
        context_lens=torch.full((sequences,), CONTEXT, dtype=torch.int32),
        block_tables=tables,
        slots=(tables[:, -1] * BLOCK_SIZE + BLOCK_SIZE - 1).contiguous(),
        positions=torch.full((sequences,), CONTEXT - 1, dtype=torch.int32),
        logits_rows=_counting(sequences),
        num_decodes=sequences,
        prefills=(),
        max_query=1,
        max_context=CONTEXT,
    )


def _counting(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m services.worker.native.bench", description=__doc__)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--cpu-time", action="store_true", help="count this process's time on all cores, not the clock's"
    )
    options = parser.parse_args()
    watch = Stopwatch(time.process_time if options.cpu_time else time.perf_counter)
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    native, portable = NativeOps(torch.device("cpu"), dtype), TorchOps(torch.device("cpu"), dtype)
    print(f"{native.name}, {options.dtype}; load average {os.getloadavg()[0]:.1f}")
    with torch.inference_mode():
        linears(watch, native, portable, dtype)
        attention(watch, native, portable, dtype)


if __name__ == "__main__":
    main()
