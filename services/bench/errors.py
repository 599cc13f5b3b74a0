"""How a benchmark fails: one clear line on standard error and a status, never a traceback."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

FAILED, INTERRUPTED = 1, 130


class BenchError(Exception):
    """The requested measurement cannot be made. The text is all that the user sees."""


def exit_code(benchmark: Callable[[], int]) -> int:
    """Runs a benchmark. Its own exit code, or 1 where it raises BenchError or ValueError, 130 after Ctrl-C."""
    try:
        return benchmark()
    except (BenchError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def exit_code_of_task(benchmark: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """See `exit_code`, for a benchmark that runs in an event loop; uvloop's where it is installed."""
    try:
        import uvloop

        run: Callable[[Coroutine[Any, Any, int]], int] = uvloop.run
    except ImportError:  # not to be had on Windows
        run = asyncio.run
    return exit_code(lambda: run(benchmark()))
