"""`bench kv`: bytes per second on each path of KV blocks, beside a plain memory copy of the same bytes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import msgspec

from services.bench.errors import BenchError
from services.bench.kv.blocks import KvOptions, KvShape, Way
from services.bench.kv.rates import MEBIBYTE, KvTransferRate, PathFailed, described
from services.bench.options import natural, output_group, output_options, parse
from services.bench.report import WIDTH, Report, Table, line, rule

PATHS: dict[Way, tuple[str, tuple[str, ...]]] = {
    "save-load": ("save_load", ("save", "load")),
    "store-to-store": ("store_to_store", ("store to store",)),
    "ssd": ("ssd_round_trip", ("to SSD", "from SSD")),
    "redis": ("redis_round_trip", ("to Redis", "from Redis")),
}
"""The module that measures each, and the names of what it measures."""
INSTALL = "pip install 'baton-serve[kvstore]'"

DESCRIPTION = """\
Moves the same blocks every way that the KV cache goes, and copies as many bytes in memory before each round (one
thread, a block at a time). The ratio is that of the two speeds: 1 is as fast as a plain copy. Tokens/s is the speed in
prompt tokens: where an engine prefills more in a second, computing them again is faster.

  save, load        device memory to the arena and back, checksums included, as a worker's rank does it
  store to store    from another store process over gRPC on loopback, checked, into an arena
  to, from SSD      through the store's SSD tier, past the page cache, in a folder of --ssd that is removed afterwards
  to, from Redis    through the store's Redis tier; with a redis-server of its own unless --redis-url names one
"""


def kv_options(argv: Sequence[str] | None) -> KvOptions:
    """Parses the flags; a bad one is explained, and ends the process with status 2."""
    made = argparse.ArgumentParser(
        prog="bench kv", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--model", type=Path, help="folder whose config.json sets the layout, in place of the next four options"
    )
    made.add_argument("--layers", type=natural, default=12)
    made.add_argument("--kv-heads", type=natural, default=4)
    made.add_argument("--head-dim", type=natural, default=64)
    made.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    made.add_argument("--blocks", type=natural, default=512, help="of 16 tokens each; default: %(default)s")
    made.add_argument("--rounds", type=natural, default=5, help="of which the median counts; default: %(default)s")
    made.add_argument("--only", nargs="+", choices=get_args(Way), default=list(get_args(Way)))
    made.add_argument("--device", default="cpu", help="of save and load, as PyTorch names it; default: %(default)s")
    made.add_argument("--redis-url", help="your own Redis; written blocks expire within a minute")
    made.add_argument("--ssd", type=Path, help="folder on the disk to be measured; default: that of temporary files")
    output_group(made)
    given = parse(made, argv)
    if given.model is not None:
        try:
            given.layers, given.kv_heads, given.head_dim = layout_of(given.model)
        except BenchError as error:
            made.error(str(error))
    given.shape = KvShape(given.layers, given.kv_heads, given.head_dim, given.dtype, given.blocks)
    given.output = output_options(given)
    return KvOptions(**{name: getattr(given, name) for name in KvOptions._fields})


def layout_of(model: Path) -> tuple[int, int, int]:
    """Layers, KV heads, size of a head. Raises BenchError."""
    path = model / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        heads = int(config["num_attention_heads"])
        head_dim = config.get("head_dim") or int(config["hidden_size"]) // heads
        return int(config["num_hidden_layers"]), int(config.get("num_key_value_heads") or heads), int(head_dim)
    except (OSError, msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise BenchError(f"--model {path}: {error!r}") from None


def main(argv: Sequence[str]) -> int:
    """The exit code: 0 if all requested measurements could be made. Raises BenchError where there is no room for the
    blocks."""
    options = kv_options(argv)
    moved: list[KvTransferRate] = []
    missing: dict[str, str] = {}
    for way in options.only:
        module, names = PATHS[way]
        # Each path needs libraries of its own; without them the others can be measured.
        try:
            moved += import_module(f"services.bench.kv.{module}").measure(options)
        except ImportError as error:
            missing[way] = f"{error.name} is not installed: {INSTALL}"
        except PathFailed as error:
            missing |= dict.fromkeys(names, str(error))
    result = {
        "shape": options.shape._asdict(),
        "block_bytes": options.shape.block.payload_bytes,
        "total_bytes": options.shape.total_bytes,
        "moved": [described(each) for each in moved],
        "missing": [{"name": name, "reason": reason} for name, reason in missing.items()],
    }
    Report(options.output).end(result, "\n".join(_lines(options, moved)))
    for name, reason in missing.items():
        print(f"bench: {name} could not be measured: {reason}", file=sys.stderr)
    return 1 if missing else 0


def _lines(options: KvOptions, moved: Sequence[KvTransferRate]) -> list[str]:
    shape = options.shape
    size = f"{shape.total_bytes / MEBIBYTE:.0f} MiB in {shape.blocks} blocks"
    lines = [rule(" KV Benchmark Result ", "="), line("Moved:", size), line("Rounds:", options.rounds)]
    per_token = shape.block.payload_bytes / shape.layout.block_size
    rows = [
        (
            each.name,
            f"{each.rate / MEBIBYTE:.0f}",
            f"{each.copy_rate / MEBIBYTE:.0f}",
            f"{each.ratio:.2f}",
            f"{each.rate / per_token:.0f}",
            "" if each.latency is None else f"{each.latency * 1e3:.2f}",
        )
        for each in moved
    ]
    headings = ("", "MiB/s", "copy MiB/s", "ratio", "tokens/s", "one block, ms")
    return [*lines, *Table(headings, rows).lines(), "=" * WIDTH]
