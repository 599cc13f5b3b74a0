"""`bench kv`: bytes per second on each path of KV blocks, beside a plain memory copy of the same bytes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from services.bench.errors import BenchError, exit_code
from services.bench.kv.blocks import KvShape
from services.bench.kv.rates import MEBIBYTE, KvTransferRate, NotMeasured, described
from services.bench.options import natural, output_group, output_options, parse
from services.bench.report import WIDTH, OutputOptions, Report, Table, line, rule

Way = Literal["save-load", "store-to-store", "redis"]
INSTALL = "pip install 'baton-serve[kvstore]'"

DESCRIPTION = """\
Moves the same blocks every way that the KV cache goes, and copies as many bytes in memory before each round (one
thread, a block at a time). The ratio is that of the two speeds: 1 is as fast as a plain copy.

  save, load        device memory to the arena and back, checksums included, as a worker's rank does it
  store to store    from another store process over gRPC on loopback, checked, into an arena
  to, from Redis    through the store's Redis tier; with a redis-server of its own unless --redis-url names one
"""


class KvOptions(NamedTuple):
    """The flags of `bench kv`."""

    shape: KvShape
    rounds: int
    only: list[Way]
    device: str
    redis_url: str | None
    output: OutputOptions


def kv_options(argv: Sequence[str] | None) -> KvOptions:
    """Parses the flags; a bad one is explained, and ends the process with status 2."""
    made = argparse.ArgumentParser(
        prog="bench kv", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model", type=Path, help="folder whose config.json gives the layout instead of the next four")
    made.add_argument("--layers", type=natural, default=12)
    made.add_argument("--kv-heads", type=natural, default=4)
    made.add_argument("--head-dim", type=natural, default=64)
    made.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    made.add_argument("--blocks", type=natural, default=512, help="of 16 tokens each; default: %(default)s")
    made.add_argument("--rounds", type=natural, default=5, help="of which the median counts; default: %(default)s")
    made.add_argument("--only", nargs="+", choices=get_args(Way), default=list(get_args(Way)))
    made.add_argument("--device", default="cpu", help="of save and load, as PyTorch names it; default: %(default)s")
    made.add_argument("--redis-url", help="a Redis of your own; what is written there expires within a minute")
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


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 if all requested measurements could be made."""
    options = kv_options(argv)
    return exit_code(lambda: measure(options))


def measure(options: KvOptions) -> int:
    """The exit code. Raises BenchError where there is no room for the blocks."""
    found = [each for way in options.only for each in measured(way, options)]
    moved = [each for each in found if isinstance(each, KvTransferRate)]
    missing = [each for each in found if isinstance(each, NotMeasured)]
    result = {
        "shape": options.shape._asdict(),
        "block_bytes": options.shape.block.payload_bytes,
        "total_bytes": options.shape.total_bytes,
        "moved": [described(each) for each in moved],
        "missing": [each._asdict() for each in missing],
    }
    Report(options.output).end(result, "\n".join(_lines(options, moved)))
    for each in missing:
        print(f"bench: {each.name} could not be measured: {each.reason}", file=sys.stderr)
    return 1 if missing else 0


def measured(way: Way, options: KvOptions) -> list[KvTransferRate | NotMeasured]:
    """Each path needs libraries of its own; without them the others can be measured. Raises BenchError."""
    measures: dict[Way, Callable[[KvOptions], list[KvTransferRate | NotMeasured]]] = {
        "save-load": _save_load,
        "store-to-store": _store_to_store,
        "redis": _redis,
    }
    try:
        return measures[way](options)
    except ImportError as error:
        return [NotMeasured(way, f"{error.name} is not installed: {INSTALL}")]


def _save_load(options: KvOptions) -> list[KvTransferRate | NotMeasured]:
    from services.bench.kv import save_load

    return save_load.measure(options.shape, options.rounds, options.device)


def _store_to_store(options: KvOptions) -> list[KvTransferRate | NotMeasured]:
    from services.bench.kv import store_to_store

    return store_to_store.measure(options.shape, options.rounds)


def _redis(options: KvOptions) -> list[KvTransferRate | NotMeasured]:
    from services.bench.kv import redis_round_trip

    return redis_round_trip.measure(options.shape, options.rounds, options.redis_url)


def _lines(options: KvOptions, moved: Sequence[KvTransferRate]) -> list[str]:
    shape = options.shape
    size = f"{shape.total_bytes / MEBIBYTE:.0f} MiB in {shape.blocks} blocks"
    lines = [rule(" KV Benchmark Result ", "="), line("Moved:", size), line("Rounds:", options.rounds)]
    rows = [
        (each.name, f"{each.rate / MEBIBYTE:.0f}", f"{each.copy_rate / MEBIBYTE:.0f}", f"{each.ratio:.2f}")
        for each in moved
    ]
    return [*lines, *Table(("", "MiB/s", "copy MiB/s", "ratio"), rows).lines(), "=" * WIDTH]


if __name__ == "__main__":
    sys.exit(main())
