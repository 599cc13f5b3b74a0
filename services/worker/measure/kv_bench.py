"""Measures how fast a rank saves and loads KV blocks, by the code that serves, beside a plain copy of the same bytes.

    python -m services.worker.measure.kv_bench --layers 12 --kv-heads 12 --head-dim 64 --dtype bfloat16 --blocks 256
    --json

Blocks and slots are in no order. Rounds of saving, loading and copying take turns, so that whatever else the machine
does meets all three; the first round, which maps every page, is left out.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch
from msgspec import Struct

from kvstore.arena.owned_arena import OwnedArena
from kvstore.core.layout import ITEM_BYTES, geometry
from services.worker.kv.copier import RankKvCache
from services.worker.kv.transfers import Transfers
from services.worker.ops.interface import OpsName, OpsUnavailable
from services.worker.ops.selector import OpsChoice
from services.worker.platforms.installed import PlatformUnavailable, built_in_platform
from shared.ids import ArenaId
from shared.messages.kvstore import KvLayout
from shared.messages.worker import Transfer
from shared.packing import pack

_ARENA = ArenaId(1)
_SHARED_MEMORY = Path("/dev/shm")


class KvBenchError(Exception):
    """KV copies cannot be measured; the text says why."""


class CopyRounds(Struct, frozen=True):
    """Seconds of each round, for `bytes` bytes."""

    ops: str
    bytes: int
    save: list[float]
    load: list[float]
    copy: list[float]

    def rate(self, seconds: list[float]) -> float:
        """Bytes per second of the median round."""
        return self.bytes / statistics.median(seconds)


def measure(layout: KvLayout, blocks: int, rounds: int, *, device: str, ops: OpsName) -> CopyRounds:
    """Saves, loads and copies `blocks` blocks, `rounds` times. Raises KvBenchError where that is not possible."""
    try:
        share, name = _share(layout, blocks, torch.device(device), ops)
    except (OpsUnavailable, PlatformUnavailable) as error:
        raise KvBenchError(str(error)) from None
    size = blocks * geometry(layout, blocks).payload_bytes
    with _arena(layout, blocks) as path:
        transfers = Transfers(share, path.parent)
        try:
            copied = _plain_copy(size, size // blocks)
            steps = (_runner(transfers, "save", path, blocks), _runner(transfers, "load", path, blocks), copied)
            taken = [[_seconds(step) for step in steps] for _ in range(rounds + 1)][1:]
        finally:
            transfers.close()
    save, load, copy = (list(column) for column in zip(*taken, strict=True))
    return CopyRounds(name, size, save, load, copy)


def _share(layout: KvLayout, blocks: int, device: torch.device, ops_name: OpsName) -> tuple[RankKvCache, str]:
    ops = built_in_platform(device).create_ops(OpsChoice(ops_name, device, getattr(torch, layout.dtype)))
    caches = [ops.allocate_kv(blocks, layout.kv_heads, layout.head_dim) for _ in range(layout.layers)]
    for halves in caches:
        for cache in halves:
            cache.normal_()
    if str(caches[0][0].dtype) != f"torch.{layout.dtype}":
        raise KvBenchError(f"{ops.name} keeps {layout.dtype} models' blocks in {caches[0][0].dtype}")
    copier = ops.kv_copier(caches, layout.head_dim)
    return RankKvCache(layout, 0, layout.kv_heads, True, blocks, copier, 0, layout.layers), ops.name


@contextmanager
def _arena(layout: KvLayout, blocks: int) -> Iterator[Path]:
    """An arena's file with every slot reserved, its memory taken."""
    parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="baton-bench-", dir=parent) as folder:
        made = OwnedArena.create(Path(folder) / "bench.arena", _ARENA, layout, blocks)
        try:
            for slot in range(blocks):
                if not made.take_memory(slot):
                    raise KvBenchError(f"{folder} has no room for {blocks} blocks: ask for fewer")
                made.reserve(slot, slot + 1, made.header(slot).hash, bytes(16), 16)
            yield made.path
        finally:
            made.close()


def _runner(transfers: Transfers, kind: Literal["save", "load"], path: Path, blocks: int) -> Callable[[], None]:
    slots = Random(1).sample(range(blocks), blocks)
    transfer = Transfer(
        number=0,
        kind=kind,
        arena=_ARENA,
        path=path.name,
        blocks=pack(Random(2).sample(range(blocks), blocks)),
        slots=pack(slots),
        generations=b"".join((slot + 1).to_bytes(8, "little") for slot in slots),
    )

    def run() -> None:
        if transfers.run(transfer, lambda: False) != "done":
            raise KvBenchError(f"the blocks could not be {kind}d")

    return run


def _plain_copy(size: int, step: int) -> Callable[[], None]:
    """A block at a time, by one thread, between pieces of memory that were touched before."""
    source, target = (memoryview(_touched_memory(size)) for _ in range(2))

    def run() -> None:
        for at in range(0, size, step):
            target[at : at + step] = source[at : at + step]

    return run


def _touched_memory(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size)
    memory.write(b"\1" * size)
    return memory


def _seconds(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _described(rounds: CopyRounds) -> dict[str, Any]:
    """For JSON: seconds of each round, and rates of the median one."""
    copied = rounds.rate(rounds.copy)
    return {
        "ops": rounds.ops,
        "bytes": rounds.bytes,
        "copy_seconds": rounds.copy,
        "copy_bytes_per_second": copied,
        **{
            name: {"seconds": seconds, "bytes_per_second": rounds.rate(seconds), "ratio": rounds.rate(seconds) / copied}
            for name, seconds in (("save", rounds.save), ("load", rounds.load))
        },
    }


def _print(described: dict[str, Any]) -> None:
    print(f"{described['bytes'] / 2**20:.0f} MiB of blocks, operations: {described['ops']}")
    print(f"{'copy':>5} {described['copy_bytes_per_second'] / 1e9:6.2f} GB/s")
    for name in ("save", "load"):
        figures = described[name]
        print(f"{name:>5} {figures['bytes_per_second'] / 1e9:6.2f} GB/s, {figures['ratio']:.0%} of the copy")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what was measured; 0 where it was, 1 where it could not be."""
    parser = argparse.ArgumentParser(prog="python -m services.worker.measure.kv_bench", description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--kv-heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=[name for name in ITEM_BYTES if "float8" not in name], default="bfloat16")
    parser.add_argument("--blocks", type=int, default=256, help="blocks moved in each round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu", help="device, in PyTorch's notation")
    parser.add_argument("--ops", choices=["auto", "torch", "native"], default="auto")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    layout = KvLayout(
        model="bench", dtype=options.dtype, layers=options.layers, kv_heads=options.kv_heads, head_dim=options.head_dim
    )
    try:
        rounds = measure(layout, options.blocks, options.rounds, device=options.device, ops=options.ops)
    except KvBenchError as error:
        print(error, file=sys.stderr)
        return 1
    described = _described(rounds)
    if options.json:
        print(json.dumps(described))
    else:
        _print(described)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
