"""`python -m services.bench.hops.streams`: keeps a number of streams open, and says `streaming` once all have begun.

A process of its own, so that reading thousands of streams delays no measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from random import Random

import msgspec
import psutil

from services.bench.client.http_client import HttpClient, HttpClientError
from services.bench.client.load import SPARE_FILES, allow_open_files
from services.bench.errors import BenchError, exit_code
from shared.config import process_environment
from shared.machine.helper_process import end_helper

KEY_VARIABLE = "BATON_BENCH_API_KEY"
PATH = "/v1/completions"
PROMPT = "Once upon a time"
STREAMING = "streaming"
BEGIN_TIMEOUT = 300.0
"""Seconds in which all streams must have begun."""
STREAM_TIMEOUT = 3600.0
MAX_OPENING = 64
"""Streams that are asked for and have not begun: a server's queue of new connections has an end."""


def stream_body(model: str, tokens: int, **more: object) -> bytes:
    """A request for exactly so many tokens, streamed."""
    fields = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    return msgspec.json.encode({**fields, **more})


@contextlib.asynccontextmanager
async def open_streams(url: str, model: str, key: str | None, streams: int, tokens: int) -> AsyncIterator[int]:
    """So many streams, in another process, all begun; they end with the context. Yields that process's id. Raises
    BenchError, in the place of psutil's NoSuchProcess, too, where the process ended within the context."""
    argv = [f"--base-url={url}", f"--model={model}", f"--streams={streams}", f"--tokens={tokens}"]
    environment = {**process_environment(), **({KEY_VARIABLE: key} if key else {})}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, *argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environment
    )
    try:
        assert process.stdout is not None
        try:
            async with asyncio.timeout(BEGIN_TIMEOUT):
                said = (await process.stdout.readline()).decode().strip()
        except TimeoutError:
            said = f"not all of {streams} began within {BEGIN_TIMEOUT:g} s"
        if said != STREAMING:
            raise _broken(said)
        try:
            yield process.pid
        except psutil.NoSuchProcess as error:
            raise _broken((await process.stdout.read()).decode().strip()) from error
    finally:
        await end_helper(process)


def _broken(said: str) -> BenchError:
    return BenchError(f"the streams: {said or 'their process has ended'}")


class _OpenStreams:
    """Owns how many have begun. One that ends is replaced by another."""

    def __init__(self, client: HttpClient, given: argparse.Namespace) -> None:
        self._client = client
        self._given = given
        self._begun = 0
        self._random = Random(11)
        self._opening = asyncio.Semaphore(MAX_OPENING)

    async def run(self) -> None:
        """Raises HttpClientError where the server refuses one or breaks it off."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._given.streams):
                tasks.create_task(self._keep_open())

    async def _keep_open(self) -> None:
        first = True

        def on_data(data: bytes, now: float) -> None:
            nonlocal first
            if first:
                first = False
                self._opening.release()
                self._begun += 1
                if self._begun == self._given.streams:
                    print(STREAMING, flush=True)

        await self._opening.acquire()
        while True:  # of lengths that differ, so that not all end at once
            tokens = self._random.randint(self._given.tokens // 2 + 1, self._given.tokens)
            body = stream_body(self._given.model, tokens)
            status = await self._client.post(PATH, body, on_data, STREAM_TIMEOUT)
            if status != 200:
                raise HttpClientError(f"HTTP {status}: the server opens no more than {self._begun}")


async def _main() -> int:
    made = argparse.ArgumentParser(prog="streams")
    made.add_argument("--base-url", required=True)
    made.add_argument("--model", required=True)
    made.add_argument("--streams", type=int, required=True)
    made.add_argument("--tokens", type=int, required=True)
    given = made.parse_args()
    os.setpriority(os.PRIO_PROCESS, 0, 0)  # as the server's processes, not as who started this one
    allow_open_files(given.streams + SPARE_FILES)
    try:
        await _OpenStreams(HttpClient(given.base_url, process_environment().get(KEY_VARIABLE)), given).run()
    except* HttpClientError as errors:
        print(errors.exceptions[0], flush=True)
    return 1


def main(argv: Sequence[str] = ()) -> int:
    """The exit code: 1, as it only ends where a stream fails."""
    return exit_code(_main)


if __name__ == "__main__":
    sys.exit(main())
