"""What it would gain to compute a step of a data-parallel group as two micro-batches, so that rows of one are on their
way to experts and back while the other is computed (vLLM's `--enable-dbo`).

    python -m tests.benchmarks.dual_batch_overlap --ranks 2

Ranks of one thread each, of an engine each, with the mixtures and projections of the Qwen3-MoE of `expert_ranks`, in
bf16; attention over contexts is left out. A step of n rows on each rank is computed as a whole, as two halves one after
the other, and as two halves whose exchanges run in a thread: all by turns. Medians of all rounds, of rank 0's wall time
and of all ranks' processor time; all three have to give the same bits.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from services.worker.distributed.lockstep import GroupTopology
from services.worker.distributed.row_exchange import RowExchange
from services.worker.distributed.torch_ranks import RankGroup, join_group
from services.worker.models.data_parallel.group_decoder import GroupDecoder
from services.worker.models.expert_parallel.settings import ExpertSettings
from services.worker.models.loaded_model import LoadSettings
from services.worker.models.model_loader import load_model
from services.worker.models.weights import MixtureMlp, dispatch_rows, mixed_arrivals
from services.worker.ops.native.native_exchange import shared_exchange
from services.worker.platforms.installed import built_in_platform
from tests.benchmarks.expert_ranks import HIDDEN, write_model

ROWS, ROUNDS, TURNS = (8, 32, 128, 512), 7, 4
EPS = 1e-6
Exchanging = Generator[Callable[[], object], None, Tensor]
"""Stops where rows are exchanged, for what exchanges them; at last what comes of its rows."""


class Steps:
    """A rank's part of a step, in three ways."""

    def __init__(self, decoder: GroupDecoder, group: RankGroup) -> None:
        self._decoder, self._ranks = decoder, group.place.group_size
        self._exchanges = [group.row_exchange("auto") for _ in range(2)]
        self._thread = ThreadPoolExecutor(1)

    def whole(self, x: Tensor) -> Tensor:
        """All rows at once."""
        return _at_once(self._layers(x, self._exchanges[0]))

    def halves(self, x: Tensor) -> Tensor:
        """One half after the other."""
        return torch.cat([_at_once(self._layers(part, self._exchanges[0])) for part in x.chunk(2)])

    def overlapped(self, x: Tensor) -> Tensor:
        """While rows of one half are exchanged in a thread the other one is computed. All ranks have the same order of
        exchanges."""
        parts = [self._layers(part, each) for part, each in zip(x.chunk(2), self._exchanges, strict=True)]
        waiting: list[Future[object] | None] = [None, None]
        done: list[Tensor | None] = [None, None]
        while None in done:
            for number, part in enumerate(parts):
                if (exchanged := waiting[number]) is not None:
                    exchanged.result()
                try:
                    waiting[number] = self._thread.submit(_inferring, next(part))
                except StopIteration as over:
                    done[number] = over.value
        return torch.cat([each for each in done if each is not None])

    def _layers(self, x: Tensor, exchange: RowExchange) -> Exchanging:
        ops, residual, counts = self._decoder.ops, torch.zeros(len(x), HIDDEN), [len(x)] * self._ranks
        for layer in self._decoder.weights.layers:
            mlp = layer.mlp
            assert isinstance(mlp, MixtureMlp)
            assert layer.mlp_norm is not None
            queries = ops.linear(x, layer.qkv)[:, :HIDDEN].to(x.dtype).contiguous()
            x, residual = ops.add_rms_norm(ops.linear(queries, layer.output), residual, layer.mlp_norm, EPS)
            yield lambda x=x, mlp=mlp: dispatch_rows(ops, mlp, x, exchange, counts)  # type: ignore[misc]
            _, mixed = mixed_arrivals(ops, mlp, exchange, "silu")
            came: list[Tensor] = []
            yield lambda mixed=mixed, came=came: came.append(exchange.combine(mixed))  # type: ignore[misc]
            x, residual = ops.add_rms_norm(came[0], residual, layer.input_norm, EPS)
        return residual


def _at_once(part: Exchanging) -> Tensor:
    while True:
        try:
            next(part)()
        except StopIteration as over:
            computed: Tensor = over.value
            return computed


def _inferring(exchange: Callable[[], object]) -> object:
    with torch.inference_mode():
        return exchange()


@torch.inference_mode()
def rank(number: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    joined = join_group(
        GroupTopology(number, ranks, 1, 0),
        rendezvous=f"file://{folder / 'meet'}",
        timeout=timedelta(seconds=60),
        shared=shared_exchange(ranks),
    )
    experts = ExpertSettings(parallel=True)
    settings = LoadSettings(
        folder=folder,
        platform=built_in_platform("cpu"),
        dtype="bfloat16",
        load_format="dummy",
        ops="native",
        max_model_len=256,
        group=joined.group,
        experts=experts,
    )
    decoder = load_model(settings).decoder
    assert isinstance(decoder, GroupDecoder)
    steps = Steps(decoder, joined.group)
    for rows in ROWS:
        x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(number)).bfloat16()
        ways: dict[str, Callable[[Tensor], Tensor]] = {
            "whole": steps.whole,
            "halves": steps.halves,
            "overlapped": steps.overlapped,
        }
        computed = [way(x) for way in ways.values()]
        assert all(each.equal(computed[0]) for each in computed)
        took: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, way in ways.items():
                dist.barrier()
                began, spent = time.perf_counter(), time.process_time()
                for _ in range(TURNS):
                    way(x)
                wall, processor = time.perf_counter() - began, torch.tensor([time.process_time() - spent])
                dist.all_reduce(processor)
                took[name].append((wall / TURNS * 1e3, processor.item() / TURNS * 1e3))
        if not number:
            for name, times in took.items():
                each = [sorted(values) for values in zip(*times, strict=True)]
                said = [f"{statistics.median(v):7.2f} ({v[0]:.2f} to {v[-1]:.2f})" for v in each]
                print(f"{rows:4} rows  {name:10} {said[0]} ms, processors {said[1]} ms", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that ends while they run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        return rank(given.rank, given.ranks, given.folder)
    with tempfile.TemporaryDirectory(prefix="baton-overlap-") as name:
        write_model(folder := Path(name))
        this = [sys.executable, "-m", "tests.benchmarks.dual_batch_overlap", f"--ranks={given.ranks}"]
        this.append(f"--folder={folder}")
        for each in [subprocess.Popen([*this, f"--rank={number}"]) for number in range(given.ranks)]:
            each.wait()


if __name__ == "__main__":
    main()
