"""How a process that was forked of one of the tests' ends."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn


def end_process(status: int) -> NoReturn:
    """Threads are waited for and functions at exit are called, as at the end of any. What the interpreter frees behind
    that is left to the kernel: to free each object is to copy all that is shared with the process it was forked of."""
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
