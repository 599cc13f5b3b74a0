"""What every benchmark does around its load: speak to the server, watch its processes, report."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from services.bench.api import Api, ApiError, Prompt, first_model
from services.bench.core.outcome import Outcome, Run
from services.bench.core.processor_time import Reading, Share, shares
from services.bench.http_client import HttpClient, HttpError
from services.bench.load import Load
from services.bench.options import OutputOptions, TargetOptions
from services.bench.progress import progress_bar

ERRORS_SHOWN = 5

Send = Callable[[Prompt], Awaitable[Outcome]]


def run_to_exit_code(benchmark: Callable[[], Awaitable[int]]) -> int:
    """Runs a benchmark: its own code, or 1 where the server is not there, 130 where the user had enough."""
    try:
        import uvloop

        run: Callable[[Any], int] = uvloop.run
    except ImportError:  # not to be had on Windows
        run = asyncio.run
    try:
        return run(benchmark())
    except (ApiError, HttpError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


@contextlib.asynccontextmanager
async def session(target: TargetOptions, ignore_eos: bool) -> AsyncIterator[Api]:
    """A server to speak to. Raises ApiError, ValueError."""
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


async def warm_up(send: Send, prompts: Sequence[Prompt]) -> None:
    """Makes each request once. Raises ApiError where one fails: so would the others."""
    for outcome in await asyncio.gather(*(send(prompt) for prompt in prompts)):
        if outcome.error is not None:
            raise ApiError(f"warm-up: {outcome.error}")


async def measured(
    load: Callable[[Callable[[Outcome], None]], Awaitable[Run]],
    total: int,
    title: str,
    output: OutputOptions,
    processes: Mapping[str, int],
) -> tuple[Run, list[Share]]:
    """Runs the load under a progress bar, and reads what the server's processes spent meanwhile."""
    before = _processor_time(processes)
    with progress_bar(total, title, output.progress and not output.json) as done:
        run = await load(done)
    tokens = sum(outcome.output_tokens for outcome in run.completed)
    return run, shares(before, _processor_time(processes), tokens, run.duration)


async def all_at_once(send: Send, prompts: Sequence[Prompt], done: Callable[[Outcome], None], limit: int | None) -> Run:
    return await Load(send, limit, done).run(prompts, [0.0] * len(prompts))


def server_processes(base_url: str, wanted: bool, pids: Mapping[str, int]) -> dict[str, int]:
    """The processes to watch, by name: those given, else those found behind the URL."""
    if pids or not wanted:
        return dict(pids)
    try:
        from services.bench.processes import find_stack
    except ImportError:  # psutil is not installed
        return {}
    return find_stack(base_url)


def _processor_time(processes: Mapping[str, int]) -> dict[str, Reading]:
    if not processes:
        return {}
    from services.bench.processes import used

    return used(dict(processes))


def provenance(api: Api, label: str | None) -> dict[str, Any]:
    """When and of what a result is, under vLLM's field names."""
    date = time.strftime("%Y%m%d-%H%M%S")
    return {"date": date, "endpoint_type": api.endpoint, "label": label, "model_id": api.model}


def report(output: OutputOptions, result: Mapping[str, Any], text: str) -> None:
    """Prints the table, or the JSON, and writes the file that was asked for."""
    encoded = msgspec.json.format(msgspec.json.encode(result), indent=2)
    print(encoded.decode() if output.json else text)
    if output.result_file is not None:
        write(output.result_file, encoded)


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content + b"\n")


def explain_failures(run: Run) -> None:
    """The first few different errors, on standard error."""
    errors = list(dict.fromkeys(outcome.error for outcome in run.failed))
    for error in errors[:ERRORS_SHOWN]:
        print(f"bench: failed: {error}", file=sys.stderr)
    if len(errors) > ERRORS_SHOWN:
        print(f"bench: and {len(errors) - ERRORS_SHOWN} other errors", file=sys.stderr)
