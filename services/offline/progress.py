"""A progress bar on standard error; nothing where that is no terminal, or where `rich` is not installed."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(total: int, wanted: bool, title: str = "generating") -> Iterator[Callable[[int], None]]:
    """Yields what is to be called, from any thread, with each finished request's output tokens."""
    if not wanted or not sys.stderr.isatty():
        yield lambda tokens: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield lambda tokens: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4, transient=True) as bar:
        task = bar.add_task(title, total=total)
        begun, produced = time.monotonic(), 0

        def done(tokens: int) -> None:
            nonlocal produced
            produced += tokens
            rate = produced / max(1e-3, time.monotonic() - begun)
            bar.update(task, advance=1, description=f"{title}, {rate:,.0f} tokens/s")

        yield done
