"""`python -m services.bench serve|latency|throughput|interference|prefixes|kv …`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

USAGE = """usage: python -m services.bench COMMAND [--help] [flags]

  serve         requests at a rate or a concurrency, streamed: TTFT, TPOT, ITL, end-to-end latency, throughput
  latency       one batch of equal requests, repeated
  throughput    every request at once: tokens per second
  interference  inter-token latency of steady streams while long prompts arrive
  prefixes      how much a file of prompts repeats their beginnings; needs no server
  kv            bytes per second of each way that KV blocks go; needs no server
"""
COMMANDS = {
    "serve": "serve",
    "latency": "latency",
    "throughput": "throughput",
    "interference": "interference",
    "prefixes": "prefixes",
    "kv": "kv_speed",
}
"""Each one's module in this package, which has a `main`."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 where every request succeeded, 2 where the flags are wrong."""
    command, *flags = list(sys.argv[1:] if argv is None else argv) or [""]
    if command in COMMANDS:
        chosen: Callable[[Sequence[str]], int] = import_module(f"services.bench.{COMMANDS[command]}").main
        return chosen(flags)
    helped = command in ("-h", "--help")
    print(USAGE, end="", file=sys.stdout if helped else sys.stderr)
    return 0 if helped else 2


if __name__ == "__main__":
    sys.exit(main())
