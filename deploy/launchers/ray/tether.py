"""`python tether.py PARENT PROGRAM …`: becomes a program that the kernel kills when PARENT, which starts it, ends.

A program of its own: between fork and exec a process with threads, as Ray's are, may run no Python. Imports nothing of
ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Never returns."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        sys.exit(1)
    with contextlib.suppress(PermissionError):  # Ray's workers have a niceness of 15, which only root may take back
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
