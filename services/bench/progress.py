"""A progress bar on standard error; nothing where that is no terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from services.bench.core.outcome import Outcome

REFRESH_PER_SECOND = 2
"""Drawing takes processor time from the server under test."""


@contextlib.contextmanager
def progress_bar(total: int, title: str, wanted: bool) -> Iterator[Callable[[Outcome], None]]:
    """Yields what is to be called with each outcome."""
    if not wanted or not sys.stderr.isatty():
        yield lambda outcome: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=REFRESH_PER_SECOND, transient=True) as bar:
        task = bar.add_task(title, total=total)
        failed = 0

        def done(outcome: Outcome) -> None:
            nonlocal failed
            failed += outcome.error is not None
            bar.update(task, advance=1, description=f"{title}, {failed} failed" if failed else title)

        yield done
