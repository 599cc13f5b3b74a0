"""`python -m services.bench COMMAND …`: the table of benchmarks. Each one's module is imported when it is run.

The `baton` command adds what only it knows: where the running stack is, the demo model, the nats-server.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from services.bench.errors import exit_code


class Benchmark(NamedTuple):
    """One command, and the function that runs it."""

    function: str
    """`module:function` in this package; it gets the flags and gives the exit code, as a coroutine perhaps."""
    help: str


BENCHMARKS = {
    "serve": Benchmark(
        "serve:main", "requests at a rate or a concurrency, streamed: TTFT, TPOT, ITL, end-to-end latency, throughput"
    ),
    "latency": Benchmark("batch:latency", "one batch of equal requests, repeated"),
    "throughput": Benchmark("batch:throughput", "every request at once: tokens per second"),
    "interference": Benchmark("interference:main", "inter-token latency of steady streams while long prompts arrive"),
    "hops": Benchmark(
        "hops.command:main",
        "what each process and message between a request and its tokens costs, by the number of streams",
    ),
    "ring": Benchmark(
        "hops.ring:main",
        "tokens a second and processor time a token by kind of process, where a simulated device computes nothing",
    ),
    "profile": Benchmark(
        "profile:main",
        "an engine's prefill time by prompt length and ITL by batch and context, for baton plan --profile",
    ),
    "startup": Benchmark(
        "startup:main", "from asking for one more engine to its first token, by stage; drains the others meanwhile"
    ),
    "prefixes": Benchmark(
        "prefixes.command:main", "how much a file of prompts repeats their beginnings; needs no server"
    ),
    "kv": Benchmark("kv.command:main", "bytes per second of each way that KV blocks go; needs no server"),
    "idle": Benchmark(
        "engine.idle:main", "the share of its time in which a worker has nothing to do between steps; starts engines"
    ),
    "speculation": Benchmark(
        "engine.speculation:main", "output tokens per second with each method of drafting and without; starts engines"
    ),
    "perplexity": Benchmark(
        "engine.perplexity:main", "how well a model predicts a text with each way to round its weights; starts engines"
    ),
    "roofline": Benchmark(
        "device.roofline:main", "a model's steps beside the device's limits, measured in the same run; needs no server"
    ),
    "kernels": Benchmark(
        "device.kernels:main", "single kernels beside torch's own operations and those limits; needs no server"
    ),
}


def usage() -> str:
    """The list of commands, one line each."""
    lines = [f"  {name:<14}{benchmark.help}" for name, benchmark in BENCHMARKS.items()]
    return "\n".join(["usage: baton bench COMMAND [--help] [flags]", "", *lines, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 where every request succeeded, 2 where the flags are wrong."""
    command, *flags = list(sys.argv[1:] if argv is None else argv) or [""]
    if command in BENCHMARKS:
        module, _, function = BENCHMARKS[command].function.partition(":")
        run = getattr(import_module(f"services.bench.{module}"), function)
        return exit_code(lambda: run(flags))
    helped = command in ("-h", "--help")
    print(usage(), end="", file=sys.stdout if helped else sys.stderr)
    return 0 if helped else 2


if __name__ == "__main__":
    sys.exit(main())
