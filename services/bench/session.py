"""The common parts of all benchmarks: the server's API, its processes, the report."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from services.bench.client.api import Api, BenchRequest, first_model
from services.bench.client.http_client import HttpClient
from services.bench.client.load import LoadGenerator, Send
from services.bench.client.processor_time import CpuReading, CpuShare, cpu_shares
from services.bench.datasets.writers import LocalTokenizer, TextWriter, TokenWriter, seen_vocabulary, text_writer
from services.bench.errors import BenchError
from services.bench.options import LoadOptions
from services.bench.report import WIDTH, Report, share_lines
from services.bench.statistics import BenchResult, RequestOutcome

ERRORS_SHOWN = 5

Load = Callable[[Callable[[RequestOutcome], None]], Awaitable[BenchResult]]
"""Makes all requests; called with what is to be called with each outcome."""


@contextlib.asynccontextmanager
async def session(options: LoadOptions) -> AsyncIterator[Api]:
    """A server to speak to. Raises BenchError, ValueError."""
    target = options.target
    client = HttpClient(target.base_url, target.api_key)
    try:
        yield Api(
            client,
            target.model or await first_model(client),
            target.endpoint,
            ignore_eos=options.ignore_eos,
            extra_body=target.extra_body,
            timeout=target.timeout,
        )
    finally:
        client.close()


async def prompt_writer(options: LoadOptions, api: Api) -> TextWriter | TokenWriter:
    """A writer by what is known of the vocabulary: the local tokenizer, else the size given, else the server."""
    local = LocalTokenizer(options.tokenizer) if options.tokenizer is not None else None
    if options.text:
        return await text_writer(local.count if local else api.count, chat=api.endpoint == "chat")
    if local is not None:
        return TokenWriter(local.vocabulary())
    return TokenWriter(range(options.vocab_size) if options.vocab_size else await seen_vocabulary(api.tokenize))


async def warm_up(send: Send, prompts: Sequence[BenchRequest]) -> None:
    """Makes each request once. Raises BenchError where one fails: so would the others."""
    for outcome in await asyncio.gather(*(send(prompt) for prompt in prompts)):
        if outcome.error is not None:
            raise BenchError(f"warm-up: {outcome.error}")


async def measured(
    load: Load,
    total: int,
    title: str,
    options: LoadOptions,
) -> tuple[BenchResult, list[CpuShare]]:
    """Runs the load under a progress bar, and reads what the server's processes spent meanwhile."""
    processes = server_processes(options)
    before = _processor_time(processes)
    with progress_bar(total, title, options.output.progress and not options.output.json) as done:
        run = await load(done)
    tokens = sum(outcome.output_tokens for outcome in run.completed)
    return run, cpu_shares(before, _processor_time(processes), tokens, run.duration)


def finish(
    options: LoadOptions, result: Mapping[str, Any], lines: Sequence[str], run: BenchResult, shares: Sequence[CpuShare]
) -> int:
    """Prints the frame around `lines`, or the JSON, and explains what failed. The exit code: 0 where nothing did."""
    Report(options.output).end(result, "\n".join([*lines, *share_lines(shares), "=" * WIDTH]))
    explain_failures(run)
    return 1 if run.failed else 0


async def all_at_once(
    send: Send, prompts: Sequence[BenchRequest], done: Callable[[RequestOutcome], None], limit: int | None
) -> BenchResult:
    """Starts every request now, at most `limit` open at a time, and waits for all."""
    return await LoadGenerator(send, limit, done).run(prompts, [0.0] * len(prompts))


def server_processes(options: LoadOptions) -> dict[str, int]:
    """The processes to watch, by name: those given, else those found behind the URL."""
    if options.pids or not options.cpu:
        return options.pids
    try:
        from services.bench.client.processes import find_stack
    except ImportError:  # psutil is not installed
        return {}
    return find_stack(options.target.base_url)


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
