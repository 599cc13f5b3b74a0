"""`python -m services.bench serve|latency|throughput …`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

USAGE = """usage: python -m services.bench COMMAND [--help] [flags]

  serve       requests at a rate or a concurrency, streamed: TTFT, TPOT, ITL, end-to-end latency, throughput
  latency     one batch of equal requests, repeated
  throughput  every request at once: tokens per second
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 where every request succeeded, 2 where the flags are wrong."""
    command, *flags = list(sys.argv[1:] if argv is None else argv) or [""]
    match command:
        case "serve":
            from services.bench import serve as chosen
        case "latency":
            from services.bench import latency as chosen  # type: ignore[no-redef]
        case "throughput":
            from services.bench import throughput as chosen  # type: ignore[no-redef]
        case "-h" | "--help":
            print(USAGE, end="")
            return 0
        case _:
            print(USAGE, end="", file=sys.stderr)
            return 2
    return chosen.main(flags)


if __name__ == "__main__":
    sys.exit(main())
