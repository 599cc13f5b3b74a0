"""The common parts of all benchmarks: the server's API, its processes, the report."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from services.bench.client.api import Api, BenchRequest, first_model
from services.bench.client.http_client import HttpClient
from services.bench.client.load import LoadGenerator
from services.bench.client.processor_time import CpuReading, CpuShare, cpu_shares
from services.bench.errors import BenchError
from services.bench.options import TargetOptions
from services.bench.report import OutputOptions
from services.bench.statistics import BenchResult, RequestOutcome

ERRORS_SHOWN = 5

Send = Callable[[BenchRequest], Awaitable[RequestOutcome]]


@contextlib.asynccontextmanager
async def session(target: TargetOptions, ignore_eos: bool) -> AsyncIterator[Api]:
    """A server to speak to. Raises BenchError, ValueError."""
    client = HttpClient(target.base_url, target.api_key)
    try:
        model = target.model or await first_model(client)
        yield Api(
            client,
            model,
            target.endpoint,
            ignore_eos=ignore_eos,
            extra_body=target.extra_body,
            timeout=target.timeout,
        )
    finally:
        client.close()


async def warm_up(send: Send, prompts: Sequence[BenchRequest]) -> None:
    """Makes each request once. Raises BenchError where one fails: so would the others."""
    for outcome in await asyncio.gather(*(send(prompt) for prompt in prompts)):
        if outcome.error is not None:
            raise BenchError(f"warm-up: {outcome.error}")


async def measured(
    load: Callable[[Callable[[RequestOutcome], None]], Awaitable[BenchResult]],
    total: int,
    title: str,
    output: OutputOptions,
    processes: Mapping[str, int],
) -> tuple[BenchResult, list[CpuShare]]:
    """Runs the load under a progress bar, and reads what the server's processes spent meanwhile."""
    before = _processor_time(processes)
    with progress_bar(total, title, output.progress and not output.json) as done:
        run = await load(done)
    tokens = sum(outcome.output_tokens for outcome in run.completed)
    return run, cpu_shares(before, _processor_time(processes), tokens, run.duration)


async def all_at_once(
    send: Send, prompts: Sequence[BenchRequest], done: Callable[[RequestOutcome], None], limit: int | None
) -> BenchResult:
    """Starts every request now, at most `limit` open at a time, and waits for all."""
    return await LoadGenerator(send, limit, done).run(prompts, [0.0] * len(prompts))


def server_processes(base_url: str, wanted: bool, pids: Mapping[str, int]) -> dict[str, int]:
    """The processes to watch, by name: those given, else those found behind the URL."""
    if pids or not wanted:
        return dict(pids)
    try:
        from services.bench.client.processes import find_stack
    except ImportError:  # psutil is not installed
        return {}
    return find_stack(base_url)


def _processor_time(processes: Mapping[str, int]) -> dict[str, CpuReading]:
    if not processes:
        return {}
    from services.bench.client.processes import used

    return used(dict(processes))


def of_the_server(api: Api) -> dict[str, Any]:
    """The options of the load, under vLLM's field names."""
    return {"endpoint_type": api.endpoint, "model_id": api.model}


def explain_failures(run: BenchResult) -> None:
    """The first few different errors, on standard error."""
    errors = list(dict.fromkeys(outcome.error for outcome in run.failed))
    for error in errors[:ERRORS_SHOWN]:
        print(f"bench: failed: {error}", file=sys.stderr)
    if len(errors) > ERRORS_SHOWN:
        print(f"bench: and {len(errors) - ERRORS_SHOWN} other errors", file=sys.stderr)


# A progress bar on standard error; nothing where that is no terminal.


REFRESH_PER_SECOND = 2
"""Drawing takes processor time from the server under test."""


@contextlib.contextmanager
def progress_bar(total: int, title: str, wanted: bool) -> Iterator[Callable[[RequestOutcome], None]]:
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

        def done(outcome: RequestOutcome) -> None:
            nonlocal failed
            failed += outcome.error is not None
            bar.update(task, advance=1, description=f"{title}, {failed} failed" if failed else title)

        yield done
