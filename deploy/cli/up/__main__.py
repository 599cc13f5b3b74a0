"""`python -m deploy.cli.up RUN_DIR READY_FD`: supervises a stack in the background, which it reads from its input.

Whoever starts it has read the command line; what that takes, 20 MiB of a stack, is not here, nor in the templates
that are forked of this process (ADR 196).
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys

from deploy.cli import end_at_once, raise_at_end, raise_interrupt


def main() -> None:
    """Returns when the stack has ended in order; an expected failure is one line and a status."""
    end_at_once()
    from deploy.cli.up.run import run_stack
    from deploy.errors import CommandError

    logging.getLogger().addHandler(logging.NullHandler())  # what libraries log is not the user's concern
    with sys.stdin.buffer as described:
        spec = pickle.load(described)
    os.open(os.devnull, os.O_RDONLY)  # the lowest free descriptor, that of the input
    raise_interrupt()
    raise_at_end()
    try:
        run_stack(spec, int(sys.argv[2]))
    except KeyboardInterrupt:  # before the stack could be asked to end: it is ended
        raise SystemExit(128 + signal.SIGTERM) from None
    except CommandError as error:
        print(f"baton: {error}", file=sys.stderr)
        raise SystemExit(error.status) from None


if __name__ == "__main__":
    main()
