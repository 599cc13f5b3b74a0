"""How `baton bench peers` is typed: what is compared, and the load as `baton bench serve` takes it."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from msgspec.structs import replace

from services.bench.options import (
    ServeOptions,
    json_object,
    natural,
    output_group,
    output_options,
    serve_options,
    whole,
)
from services.bench.report import OutputOptions, command_line
from tests.campaigns.transformers_peer.wire import PeerAttention

UNLIMITED = "inf"
_TOKENS_ONLY = ("random", "shared-prefix")


class PeersOptions(NamedTuple):
    model: str | None
    load_format: str | None
    device: str
    dtype: str
    threads: int | None
    up: list[str]
    """More arguments of `baton up`."""
    attention: PeerAttention
    settings: dict[str, Any]
    """Of transformers' batching."""
    compared: int
    """Prompts whose greedy tokens are compared."""
    loads: list[ServeOptions]
    """One after the other, on both."""
    with_peer: bool
    output: OutputOptions
    logs: Path | None
    """Where the stack's go."""


def peers_options(argv: Sequence[str], up: str | None) -> PeersOptions:
    """Raises SystemExit for invalid flags."""
    parser = _parser()
    given, load = parser.parse_known_args(argv)
    given.command = command_line(parser.prog, argv, None)
    return PeersOptions(
        model=given.model,
        load_format=given.load_format,
        device=given.device,
        dtype=given.dtype,
        threads=given.threads,
        up=shlex.split(up or ""),
        attention=given.peer_attention,
        settings=given.peer_settings,
        compared=given.compare,
        loads=[_load(parser, load, each, number) for number, each in enumerate(given.max_concurrency)],
        with_peer=given.peer == "transformers",
        output=output_options(given),
        logs=given.output_log,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "baton bench peers",
        description="The same model under the same load, through the whole ring and by transformers' own continuous "
        "batching, one after the other. transformers is asked in its own process: nothing is streamed or detokenized "
        "there, and its tokens' times are its own.",
        epilog="What the load is, is said as for `baton bench serve`: --num-prompts, --random-input-len, "
        "--random-output-len, --random-range-ratio, --request-rate, --burstiness, --seed, --warmup, --percentiles, "
        "--dataset shared-prefix … Answers have their full length. --up '…' gives more arguments of `baton up`.",
    )
    parser.add_argument("--model", help="Directory, or with --load-format dummy a shape's name; the demo model.")
    parser.add_argument("--load-format", choices=["auto", "safetensors", "dummy"], help="dummy: random weights, alike.")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")
    parser.add_argument("--threads", type=natural, help="CPU threads of either's worker; by default their own choice.")
    parser.add_argument("--max-concurrency", type=_limits, default=[None], metavar="N,N", help="inf: all at once.")
    parser.add_argument("--compare", type=whole, default=8, help="Prompts whose greedy tokens are compared.")
    parser.add_argument("--peer-attention", choices=get_args(PeerAttention), default="auto")
    parser.add_argument(
        "--peer-settings", type=json_object, default={}, metavar="JSON", help="Fields of its ContinuousBatchingConfig."
    )
    parser.add_argument("--peer", choices=["transformers", "none"], default="transformers", help="none: Baton alone.")
    parser.add_argument("--output-log", type=Path, metavar="FILE", help="Write what the stack's processes said here.")
    output_group(parser)
    return parser


def _limits(text: str) -> list[int | None]:
    return [None if each == UNLIMITED else natural(each) for each in text.split(",")]


def _load(parser: argparse.ArgumentParser, argv: Sequence[str], limit: int | None, number: int) -> ServeOptions:
    """Each of them has prompts of its own, as what one computed lies in the other's caches."""
    at_once = [] if limit is None else [f"--max-concurrency={limit}"]
    options = serve_options(["--ignore-eos", *argv, *at_once])
    if options.dataset not in _TOKENS_ONLY or options.text:
        parser.error(f"--dataset: prompts are token ids here, of {' or '.join(_TOKENS_ONLY)}")
    return replace(options, seed=options.seed + number)
