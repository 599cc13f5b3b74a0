"""What a mixture's rows cost on their way to experts and back, in each mode, by the number of rows and their width.

    python -m tests.benchmarks.row_exchanges --ranks 4

Ranks of one thread each, of an engine each, that have as many rows; 8 random picks of 64 experts; nothing is computed.
Medians of all rounds of rank 0's wall time and of the processor time of all, modes by turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from services.worker.distributed.all2all import All2AllBackend
from services.worker.distributed.lockstep import GroupTopology
from services.worker.distributed.row_exchange import RoutedRows
from services.worker.distributed.torch_ranks import join_group
from services.worker.ops.native.native_exchange import shared_exchange

MODES: tuple[All2AllBackend, ...] = ("allgather_reducescatter", "low_latency", "high_throughput")
EXPERTS, CHOSEN, ROUNDS, TURNS = 64, 8, 5, 10
CASES = ((4, 512), (64, 512), (512, 512), (4, 4096), (64, 4096), (512, 4096))
"""Rows of each engine, and their elements in bf16."""


def rank(number: int, ranks: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    group = join_group(
        GroupTopology(number, ranks, 1, 0),
        rendezvous=rendezvous,
        timeout=timedelta(seconds=60),
        shared=shared_exchange(ranks),
    ).group
    exchanges = {mode: group.row_exchange(mode) for mode in MODES}
    for rows, hidden in CASES:
        chance = torch.Generator().manual_seed(number)
        picks = torch.rand(rows, EXPERTS, generator=chance).topk(CHOSEN).indices
        own = RoutedRows(torch.randn(rows, hidden).bfloat16(), picks, torch.rand(rows, CHOSEN))
        took: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
        for _ in range(ROUNDS):
            for mode, exchange in exchanges.items():
                dist.barrier()
                began, spent = time.perf_counter(), time.process_time()
                for _ in range(TURNS):
                    exchange.start(own, picks * ranks // EXPERTS, [rows] * ranks)
                    exchange.combine(exchange.arrived().rows.float())
                wall, processor = time.perf_counter() - began, torch.tensor([time.process_time() - spent])
                dist.all_reduce(processor)
                took[mode].append((wall / TURNS * 1e3, processor.item() / TURNS * 1e3))
        if not number:
            for mode, times in took.items():
                wall, processor = (statistics.median(each) for each in zip(*times, strict=True))
                print(
                    f"{rows:4} rows of {hidden:4}  {mode:24} {wall:7.2f} ms, processors {processor:7.2f} ms", flush=True
                )
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that ends while they run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        return rank(given.rank, given.ranks, given.rendezvous)
    with tempfile.TemporaryDirectory(prefix="baton-rows-") as name:
        this = [sys.executable, "-m", "tests.benchmarks.row_exchanges", f"--ranks={given.ranks}"]
        this.append(f"--rendezvous=file://{Path(name) / 'meet'}")
        for each in [subprocess.Popen([*this, f"--rank={number}"]) for number in range(given.ranks)]:
            each.wait()


if __name__ == "__main__":
    main()
