"""The provider that is sent what cannot be served here in time: an HTTP client with deadlines, a budget and a breaker.

Whatever it does wrong before its answer has begun is no answer at all: the caller goes on as if there were no provider.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from services.gateway.api.forwarding import (
    NO_USAGE,
    ForwardedRequest,
    ForwardedStream,
    ProviderUsage,
    usage_of_body,
)
from services.gateway.core.overflow import ModelNames, OverflowBudget, OverflowLimits, ProviderDialect
from services.gateway.metrics import (
    OVERFLOW_BREAKER_OPEN,
    OVERFLOW_FIRST_BYTE,
    OVERFLOW_OPEN,
    OVERFLOW_REQUESTS,
    OVERFLOW_TOKENS,
)

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

HOP_HEADER = b"x-baton-overflow"
"""Sent with every request to the provider. A gateway that gets it sends the request nowhere else, so that two stacks
that overflow into each other do not pass one on for ever. Clients may send it, too."""
CONNECT_TIMEOUT = 5.0
MAX_ANSWER_BYTES = 64 * 2**20
"""Of an answer in one body, which is held until it is complete."""
KEEP_ALIVE = 30.0
"""Seconds that an idle connection is kept: shorter than most servers do, so that few requests meet its end."""

OverflowCause = Literal["full", "unavailable", "slow"]
"""full: it was refused here with 429. unavailable: with 503. slow: it would wait, or has waited, for too long."""
OverflowOutcome = Literal["served", "broken off", "client left", "not needed", "no answer", "not forwardable"]
"""broken off: the provider's stream ended too early. not needed: the first token came from here meanwhile, or the
client left. no answer: the provider was not reached, was too slow, or refused. Others: `OverflowBudget.refusal`."""


class OverflowSettings(NamedTuple):
    """How the provider is reached, and when."""

    url: str
    """With its version: https://api.example.com/v1."""
    key: str | None
    models: ModelNames
    dialect: ProviderDialect
    wait: float
    """Seconds without a first token after which it is asked."""
    silence: float
    """Seconds that a stream may be silent, from the request on."""
    answer: float
    """Seconds that a whole answer may take."""
    limits: OverflowLimits


class ProviderError(Exception):
    """The provider gave no answer, or not all of it; the text has nothing of what it said."""


class OverflowProvider:
    """Owns the connections to the provider, and its budget."""

    def __init__(self, settings: OverflowSettings) -> None:
        self.settings = settings
        self.budget = OverflowBudget(settings.limits, time.monotonic())
        self._session: aiohttp.ClientSession | None = None

    @staticmethod
    def check_installed() -> None:
        """Raises ImportError where the client's library is missing."""
        import aiohttp  # noqa: F401 - gateways without a provider do without it

    @property
    def usable(self) -> bool:
        """Whether a request could be sent there now."""
        refusal = self.budget.refusal(time.monotonic())
        OVERFLOW_BREAKER_OPEN.set(self.budget.breaker_is_open)
        return refusal is None

    @property
    def idle(self) -> bool:
        """Whether no request is open there."""
        return not self.budget.open

    async def close(self) -> None:
        """Closes all connections; answers that are being read break off."""
        if self._session is not None:
            await self._session.close()

    async def ask(self, request: ForwardedRequest, cause: OverflowCause) -> ProviderAnswer | None:
        """Returns the answer once it has begun, to be closed by the caller; None where there is none to be had."""
        began = time.monotonic()
        refusal = self.budget.refusal(began)
        OVERFLOW_BREAKER_OPEN.set(self.budget.breaker_is_open)
        if refusal is not None:
            self.record(cause, refusal, request, began)
            return None
        self.budget.start(began)
        OVERFLOW_OPEN.set(self.budget.open)
        answer = ProviderAnswer(self, request, cause, began)
        try:
            await answer.begin(await self._post(request))
        except ProviderError as error:
            await answer.close("no answer", str(error))
            return None
        except BaseException:
            answer.abort()
            await answer.close("not needed")
            raise
        OVERFLOW_FIRST_BYTE.observe(time.monotonic() - began)
        return answer

    async def _post(self, request: ForwardedRequest) -> aiohttp.ClientResponse:
        """The response, once its head has come with status 200. Raises ProviderError."""
        import aiohttp

        settings = self.settings
        if self._session is None:
            headers = {HOP_HEADER.decode(): "1", "accept-encoding": "identity", "content-type": "application/json"}
            if settings.key:
                headers["authorization"] = f"Bearer {settings.key}"
            connector = aiohttp.TCPConnector(limit=settings.limits.concurrency, keepalive_timeout=KEEP_ALIVE)
            self._session = aiohttp.ClientSession(
                connector=connector, headers=headers, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
            )
        silence = settings.silence if request.stream else settings.answer
        timeout = aiohttp.ClientTimeout(total=settings.answer, connect=CONNECT_TIMEOUT, sock_read=silence)
        url = settings.url.rstrip("/") + request.path
        try:
            response = await self._session.post(url, data=request.body, timeout=timeout, allow_redirects=False)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            self.budget.record_failure(time.monotonic())
            raise ProviderError(_said(error)) from None
        if response.status == 200:
            return response
        response.close()
        if response.status not in (400, 413, 422):  # those are the request's fault
            self.budget.record_failure(time.monotonic())
        raise ProviderError(f"status {response.status}")

    def record(
        self, cause: OverflowCause, outcome: str, sent: ForwardedRequest | None, began: float, **more: Any
    ) -> None:
        """Counts and logs what came of a request: nothing of its text, and no key."""
        OVERFLOW_REQUESTS.labels(cause, outcome).inc()
        model = {} if sent is None else {"model": sent.model, "provider_model": sent.provider_model}
        fields = {"cause": cause, "outcome": outcome, **model, "duration": round(time.monotonic() - began, 4), **more}
        level = logging.INFO if outcome in ("served", "client left", "not needed") else logging.WARNING
        log.log(level, "overflow", extra={name: value for name, value in fields.items() if value is not None})


class ProviderAnswer:
    """Owns one answer until `close`. It is made before there is anything of it, so that the budget counts it."""

    def __init__(
        self, provider: OverflowProvider, request: ForwardedRequest, cause: OverflowCause, began: float
    ) -> None:
        self.request = request
        self.content_type = b"application/json"
        self.usage: ProviderUsage = NO_USAGE
        self._provider, self._cause, self._began = provider, cause, began
        self._response: aiohttp.ClientResponse | None = None
        self._stream = ForwardedStream(shows_usage=request.shows_usage)
        self._ready = b""
        """What has come, and was not handed over."""
        self._closed = False

    async def begin(self, response: aiohttp.ClientResponse) -> None:
        """Waits for the first event of a stream, or for a whole body. Raises ProviderError."""
        self._response = response
        self.content_type = response.headers.get("content-type", "application/json").encode("latin-1", "replace")
        parts: list[bytes] = []
        size = 0
        async for data in self._data():
            size += len(data)
            if size > MAX_ANSWER_BYTES:
                raise self._failure(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
            parts.append(self._stream.feed(data) if self.request.stream else data)
            if self.request.stream and self._stream.begun:
                break
        self._ready = b"".join(parts)
        if self.request.stream and (self._stream.failed or not self._stream.begun):
            raise self._failure("an error in place of a stream")
        if not self.request.stream:
            self.usage = usage_of_body(self._ready)
        self._provider.budget.record_answer()

    async def parts(self) -> AsyncIterator[bytes]:
        """Yields what the client gets, as it comes. Raises ProviderError where the rest does not come."""
        yield self._ready
        if self.request.stream:
            async for data in self._data():
                yield self._stream.feed(data)
            yield self._stream.rest()

    async def _data(self) -> AsyncIterator[bytes]:
        import aiohttp

        assert self._response is not None
        try:
            async for data in self._response.content.iter_any():
                yield data
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._failure(_said(error)) from None

    def _failure(self, what: str) -> ProviderError:
        if not self._closed:
            self._provider.budget.record_failure(time.monotonic())
        return ProviderError(what)

    def abort(self) -> None:
        """Closes the connection at once: `parts` ends with a ProviderError."""
        self._closed = True
        if self._response is not None:
            self._response.close()

    async def close(self, outcome: OverflowOutcome, why: str | None = None, **more: Any) -> None:
        """Ends it, settles the budget, and counts and logs the outcome; once."""
        if self._response is not None:
            if outcome == "served":
                self._response.release()  # the connection is used again
            else:
                self._response.close()
        if self.request.stream:
            self.usage = self._stream.usage
        budget = self._provider.budget
        budget.end(self.usage.total)
        OVERFLOW_OPEN.set(budget.open)
        OVERFLOW_BREAKER_OPEN.set(budget.breaker_is_open)
        OVERFLOW_TOKENS.labels("prompt").inc(max(0, self.usage.prompt_tokens))
        OVERFLOW_TOKENS.labels("completion").inc(max(0, self.usage.completion_tokens))
        tokens = {"prompt_tokens": self.usage.prompt_tokens, "output_tokens": self.usage.completion_tokens}
        self._provider.record(self._cause, outcome, self.request, self._began, why=why, **tokens, **more)


def _said(error: BaseException) -> str:
    """An error's kind, without texts that might quote a URL or a header."""
    return "too slow" if isinstance(error, TimeoutError) else type(error).__name__
