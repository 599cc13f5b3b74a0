"""`baton batch`: answers a file of requests, a bounded number at a time, and goes on where an earlier run stopped."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from deploy.cli.batch.files import BatchOutput
from deploy.cli.batch.http_server import AnswerRequest
from deploy.errors import CommandError
from services.gateway.api.batches.lines import (
    BadLine,
    BatchRequest,
    answered_line,
    line_id,
    read_line,
    refused_line,
)
from shared.error_groups import innermost

Progress = Callable[[bool], None]
"""Called for each answer with whether it is a good one."""


def answer_batch(
    source: Path, target: Path, server: AbstractAsyncContextManager[AnswerRequest], concurrency: int
) -> None:
    """Ends with status 130 where the user had enough. Raises CommandError."""
    ids = _ids(source)
    output = BatchOutput(target, ids)
    waiting = len(ids) - len(output.answered)
    counters = BatchCounters(len(ids), len(output.answered))
    try:
        if waiting:
            with _progress(waiting) as show:
                asyncio.run(_answer_all(source, output, server, concurrency, counters, show))
    except KeyboardInterrupt:
        print(f"baton: {counters.sentence(target)}; run the same command to go on", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        output.close()
    print(counters.sentence(target), file=sys.stderr)


class BatchCounters:
    """Owns the counts that the last line reports."""

    def __init__(self, requests: int, before: int) -> None:
        self.requests, self.before = requests, before
        self.good = self.bad = 0

    def sentence(self, target: Path) -> str:
        """How many requests have an answer in the output file, for a person."""
        done = self.before + self.good + self.bad
        earlier = f", {self.before} of them earlier" if self.before else ""
        bad = f"; {self.bad} could not be served, see their error or status_code" if self.bad else ""
        return f"{done} of {self.requests} requests answered in {target}{earlier}{bad}"


def _lines(source: Path) -> Iterator[tuple[int, bytes]]:
    """Yields each line that is not blank with its number, counted from 1."""
    try:
        with source.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise CommandError(f"{source}: {error.strerror}") from None


def _ids(source: Path) -> set[str]:
    return {line_id(number, line) for number, line in _lines(source)}


def _requests(source: Path, answered: set[str]) -> Iterator[BatchRequest | BadLine]:
    """The requests without an answer. A `custom_id` in two lines is an error: their answers would look the same."""
    seen: dict[str, int] = {}
    for number, line in _lines(source):
        request = read_line(number, line)
        first = number if request.custom_id is None else seen.setdefault(request.custom_id, number)
        if request.id in answered:
            continue
        if first != number:
            message = f"line {number}: custom_id {request.custom_id!r} stands in line {first} already"
            yield BadLine(request.id, request.custom_id, "duplicate_custom_id", message)
        else:
            yield request


async def _answer_all(
    source: Path,
    output: BatchOutput,
    server: AbstractAsyncContextManager[AnswerRequest],
    concurrency: int,
    counters: BatchCounters,
    show: Progress,
) -> None:
    requests = _requests(source, output.answered)

    def note(line: bytes, good: bool) -> None:
        output.write(line)
        counters.good += good
        counters.bad += not good
        show(good)

    async def work(ask: AnswerRequest) -> None:
        """One of several that take requests from the same iterator."""
        for request in requests:
            if isinstance(request, BadLine):
                note(refused_line(request), False)
                await asyncio.sleep(0)
            else:
                answer = await ask(request)
                note(answered_line(request, answer), answer.status == 200)

    async with server as ask:
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(concurrency):
                    tasks.create_task(work(ask))
        except BaseExceptionGroup as errors:
            raise innermost(errors) from None


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Progress]:
    """A bar on standard error; nothing where that is no terminal."""
    if not sys.stderr.isatty():
        yield lambda good: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4, transient=True) as bar:
        task = bar.add_task("requests", total=total)
        failed = 0

        def show(good: bool) -> None:
            nonlocal failed
            failed += not good
            bar.update(task, advance=1, description=f"requests, {failed} refused" if failed else "requests")

        yield show
