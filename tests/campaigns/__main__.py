"""`python -m tests.campaigns gpu|peers|guard [flags]`: `baton bench gpu`, `baton bench peers`, `make bench-guard`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from deploy.errors import CommandError

USAGE = "usage: python -m tests.campaigns gpu|peers|guard [--help] [flags]"


def main(argv: Sequence[str]) -> int:
    """The exit code. `--up=…`, first among the flags of `peers`, has more arguments of `baton up`."""
    try:
        match list(argv):
            case ["gpu", *flags]:
                from tests.campaigns.gpu import run_gpu

                run_gpu(flags)
            case ["peers", up, *flags] if up.startswith("--up="):
                from tests.campaigns.peers import run_peers

                run_peers(flags, up.removeprefix("--up="))
            case ["guard", *flags]:
                from tests.campaigns.guard import run_guard

                return run_guard(flags)
            case ["peers", *flags]:
                from tests.campaigns.peers import run_peers

                run_peers(flags, None)
            case _:
                print(USAGE, file=sys.stderr)
                return 2
    except CommandError as error:
        print(f"baton: {error}", file=sys.stderr)
        return error.status
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
