"""How a benchmark fails: one clear line on standard error and a status, never a traceback."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

FAILED, INTERRUPTED = 1, 130


class BenchError(Exception):
    """The requested measurement cannot be made. The text is all that the user sees."""


def exit_code(benchmark: Callable[[], int | Coroutine[Any, Any, int]]) -> int:
    """Runs a benchmark, in an event loop where it needs one (uvloop's where it is installed). Its own exit code, or 1
    where it raises BenchError or ValueError, 130 after Ctrl-C."""
    try:
        status = benchmark()
        return status if isinstance(status, int) else _run(status)
    except (BenchError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(benchmark: Coroutine[Any, Any, int]) -> int:
    try:
        import uvloop
    except ImportError:  # not to be had on Windows
        return asyncio.run(benchmark)
    return uvloop.run(benchmark)
