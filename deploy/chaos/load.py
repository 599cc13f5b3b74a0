"""Clients that stream without a pause while faults strike, and what each stream got, token by token.

Every client asks one request after the other. There are few different requests, greedy ones and sampled ones with a
seed, so that the text of each is known from the undisturbed run.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from deploy.chaos.faults.fault import FailureKind
from services.bench.client.http_client import HttpClient, HttpClientError
from services.bench.client.stream import FrameScanner, StreamError

PATH = "/v1/completions"
STREAM_DEADLINE = 120.0
"""Seconds within which every stream has to end."""
RETRY_AFTER = 0.5
"""Seconds that a client waits after an error before it asks again."""
POLL = 0.01
MAX_MESSAGE = 300
REQUESTS = 16
SAMPLED_TEMPERATURE = 0.8


class Prompt(NamedTuple):
    """One of the few requests that all clients make."""

    text: str
    temperature: float
    seed: int


class Stream(NamedTuple):
    """One request as its client saw it. Times are of `time.perf_counter`."""

    prompt: int
    """Index of what was asked."""
    client: int
    start: float
    end: float
    arrivals: tuple[float, ...]
    """When each piece of its text came."""
    text: str
    failure: FailureKind | None
    message: str = ""
    """What the client was told where it failed."""

    def longest_wait(self, since: float) -> float:
        """The longest time in seconds without a token from `since` on, or from its own start where that was later."""
        points = [max(self.start, since), *(at for at in self.arrivals if at > since)]
        return max((later - before for before, later in pairwise(points)), default=0.0)

    def longest_pause(self, since: float) -> float:
        """The longest time in seconds between two of its tokens that ended after `since` (the greatest inter-token
        latency)."""
        pauses = (later - before for before, later in pairwise(self.arrivals) if later > since)
        return max(pauses, default=0.0)


def waits(streams: Sequence[Stream], since: float) -> list[float]:
    """For each stream its longest wait from `since` on; for one that failed until its client's next token, in another
    stream, which a client that gave up has not."""
    found = []
    for stream in streams:
        if stream.failure is None:
            found.append(stream.longest_wait(since))
            continue
        last = max([since, stream.start, *stream.arrivals])
        tokens = (at for other in streams if other.client == stream.client for at in other.arrivals if at > last)
        if (after := min(tokens, default=None)) is not None:
            found.append(after - last)
    return found


def prompts() -> list[Prompt]:
    """Of different lengths, some with a common beginning; half of them greedy, half of them sampled."""
    days = [f"On day {day} the fox met hare {day * 7 % 31} by the old mill." for day in range(40)]
    return [
        Prompt(
            " ".join(days[at % 3 : at % 3 + 1 + at]),
            SAMPLED_TEMPERATURE if at % 2 else 0.0,
            at,
        )
        for at in range(REQUESTS)
    ]


class Load:
    """Owns the clients of one stack."""

    def __init__(self, url: str, api_key: str | None, model: str, *, clients: int, tokens: int) -> None:
        """`tokens`: of each answer."""
        self.clients = clients
        self._http = HttpClient(url, api_key)
        self._model, self._tokens = model, tokens
        self._prompts = prompts()
        self._asked = 0
        self._served = [0.0] * clients
        """For each client the start of the newest request that brought a token."""

    def close(self) -> None:
        """Closes the connections that no request uses."""
        self._http.close()

    async def each_once(self, salt: str) -> list[Stream]:
        """Every request once, all at the same time, in their order."""
        gathered = (self._stream(at, at % self.clients, salt) for at in range(len(self._prompts)))
        return list(await asyncio.gather(*gathered))

    def served_since(self, moment: float) -> bool:
        """Whether every client got a token of a request that began after `moment`: all of the ring works for it."""
        return all(start > moment for start in self._served)

    async def run(self, over: asyncio.Event, salt: str) -> list[Stream]:
        """Keeps all clients busy until `over`, and then until each stream has ended."""
        seen: list[Stream] = []

        async def client(number: int) -> None:
            while not over.is_set():
                self._asked += 1
                stream = await self._stream(self._asked % len(self._prompts), number, salt)
                seen.append(stream)
                if stream.failure is not None:
                    await asyncio.sleep(RETRY_AFTER)

        async with asyncio.TaskGroup() as tasks:
            for number in range(self.clients):
                tasks.create_task(client(number))
        return seen

    async def _stream(self, at: int, client: int, salt: str) -> Stream:
        scanner, start, arrivals = FrameScanner(keep_text=True), time.perf_counter(), list[float]()

        def received(data: bytes, now: float) -> None:
            if data.startswith(b"data:"):  # a comment keeps the connection alive, and is no token
                arrivals.append(now)
                self._served[client] = start
            scanner.feed(data, now)

        failure: FailureKind | None
        text, failure, message = "", None, ""
        try:
            async with asyncio.timeout(STREAM_DEADLINE):
                status = await self._http.post(PATH, self._body(at, salt), received, 2 * STREAM_DEADLINE)
            if status != 200:
                failure = "refused" if status in (429, 503) else "error"
                message = f"HTTP {status}: {_error_text(scanner.unfinished)}"
            else:
                text = scanner.finish().text
        except TimeoutError:
            failure, message = "hung", f"no end within {STREAM_DEADLINE:g} s"
        except HttpClientError as error:
            failure, message = "connection", str(error)
        except StreamError as error:
            failure, message = "error", str(error)
        end = time.perf_counter()
        return Stream(at, client, start, end, tuple(arrivals), text, failure, message[:MAX_MESSAGE])

    def _body(self, at: int, salt: str) -> bytes:
        prompt = self._prompts[at]
        return msgspec.json.encode(
            {
                "model": self._model,
                "prompt": prompt.text,
                "max_tokens": self._tokens,
                "temperature": prompt.temperature,
                "seed": prompt.seed,
                "ignore_eos": True,
                "stream": True,
                "cache_salt": salt,
            }
        )


def _error_text(body: bytes) -> str:
    with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
        told: Any = msgspec.json.decode(body)["error"]
        return str(told["message"])
    return body.decode(errors="replace")


def first_difference(expected: Sequence[Stream], seen: Sequence[Stream]) -> str | None:
    """What the first stream of `seen` that failed, or has another text than `expected`, got; None where all are the
    same."""
    for stream in seen:
        if stream.failure is not None:
            return f"request {stream.prompt} failed: {stream.message}"
        if stream.text != expected[stream.prompt].text:
            return f"request {stream.prompt}: {stream.text!r} in place of {expected[stream.prompt].text!r}"
    return None
