"""Who answers a batch's requests: a server over HTTP, or an engine in this process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp

from deploy.cli.gateway_client import checked_tls
from deploy.errors import CommandError
from services.gateway.api.batches.lines import BatchAnswer, BatchRequest
from shared.reliability.retry import Backoff

AnswerRequest = Callable[[BatchRequest], Awaitable[BatchAnswer]]

ANSWER_TIMEOUT = 3600.0
"""Seconds for one answer, queueing included."""
BUSY = (429, 502, 503, 504)
"""Statuses that say: not now."""
RETRY = Backoff(first=0.25, longest=15.0)


@contextlib.asynccontextmanager
async def http_server(
    base_url: str, api_key: str | None, concurrency: int, patience: float
) -> AsyncIterator[AnswerRequest]:
    """While a server is away or busy, requests are retried for `patience` seconds. Then raises CommandError."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT, sock_connect=10)
    connector = aiohttp.TCPConnector(limit=concurrency, ssl=checked_tls())
    root = base_url.rstrip("/").removesuffix("/v1")
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:

        async def ask(request: BatchRequest) -> BatchAnswer:
            return await _patiently(lambda: _posted(session, root, request), root, patience)

        yield ask


async def _posted(session: aiohttp.ClientSession, root: str, request: BatchRequest) -> tuple[BatchAnswer, float | None]:
    headers = {"Content-Type": "application/json", "X-Request-Id": request.id}
    async with session.post(root + request.url, data=request.body, headers=headers) as response:
        body = await response.read()
        answer = BatchAnswer(response.status, response.headers.get("X-Request-Id", request.id), body)
        retry_after = response.headers.get("Retry-After", "")
        return answer, float(retry_after) if retry_after.isdecimal() else None


async def _patiently(
    post: Callable[[], Awaitable[tuple[BatchAnswer, float | None]]], root: str, patience: float
) -> BatchAnswer:
    end = time.monotonic() + patience
    tries = 0
    while True:
        try:
            answer, wanted = await post()
            if answer.status not in BUSY:
                return answer
            why = f"it answers {answer.status}"
        except (aiohttp.ClientError, TimeoutError) as error:
            why, wanted = str(error) or type(error).__name__, None
        if time.monotonic() >= end:
            raise CommandError(f"{root}: given up after {patience:g} s ({why}); run the same command to go on")
        await asyncio.sleep(min(RETRY.longest, max(RETRY.pause(tries), wanted or 0.0)))
        tries += 1
