"""The few calls of the OpenAI API (and vLLM's additions) that a load generator makes."""

from __future__ import annotations

import time
from typing import Any, Literal, NamedTuple

import msgspec

from services.bench.client.http_client import HttpClient, HttpClientError, Response
from services.bench.client.stream import FrameScanner, StreamError
from services.bench.errors import BenchError
from services.bench.statistics import RequestOutcome
from shared.packing import NOT_DECODED

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

Messages = tuple[tuple[str, str], ...]
"""(role, content) of each message."""
PromptBody = str | list[int] | Messages
ERROR_SHOWN = 300


class BenchRequest(NamedTuple):
    """One request to make."""

    body: PromptBody
    tokens: int | None
    """How long the prompt is meant to be, where that is known; the server's own count is what is reported."""
    output_tokens: int


class Api:
    """Speaks to one server as one model."""

    def __init__(
        self,
        client: HttpClient,
        model: str,
        endpoint: Endpoint,
        *,
        ignore_eos: bool = False,
        extra_body: dict[str, Any] | None = None,
        timeout: float = 600.0,
    ) -> None:
        self.client, self.model, self.endpoint = client, model, endpoint
        self._path = PATHS[endpoint]
        self._extra = {**({"ignore_eos": True} if ignore_eos else {}), **(extra_body or {})}
        self._timeout = timeout

    async def stream(self, prompt: BenchRequest, keep_text: bool = False) -> RequestOutcome:
        """Makes a streaming request and times its tokens. Failures are in the outcome; so is the answer, if kept."""
        body = self._body(prompt, {"stream": True, "stream_options": {"include_usage": True}})
        scanner = FrameScanner(keep_text)
        start = time.perf_counter()
        try:
            status = await self.client.post(self._path, body, scanner.feed, self._timeout)
            if status != 200:
                raise HttpClientError(_error_of(status, scanner.unfinished))
            stream = scanner.finish()
        except (HttpClientError, StreamError) as error:
            return _failure(start, str(error))
        if not stream.token_times:
            return _failure(start, "a stream without any token")
        return RequestOutcome(
            start=start,
            end=stream.token_times[-1],
            prompt_tokens=(prompt.tokens or 0) if stream.prompt_tokens is None else stream.prompt_tokens,
            output_tokens=stream.output_tokens,
            token_times=stream.token_times,
            cached_tokens=stream.cached_tokens,
            text=stream.text,
        )

    async def whole(self, prompt: BenchRequest) -> RequestOutcome:
        """Makes a request whose answer comes in one piece."""
        start = time.perf_counter()
        try:
            response = await self.client.call("POST", self._path, self._body(prompt, {}), self._timeout)
            if response.status != 200:
                raise HttpClientError(_error_of(*response))
            usage = _object(response)["usage"]
            counts = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        except (HttpClientError, BenchError, KeyError, TypeError) as error:
            return _failure(start, str(error) or repr(error))
        return RequestOutcome(start, time.perf_counter(), *counts, [])

    async def count(self, body: PromptBody) -> int:
        """How many tokens the server makes of a prompt, template and special tokens included. Raises BenchError."""
        return len(await self.tokenize(body))

    async def tokenize(self, body: PromptBody) -> list[int]:
        """The prompt's tokens (`POST /tokenize`, as vLLM has it). Raises BenchError."""
        question = msgspec.json.encode({"model": self.model, **_prompt_fields(body)})
        try:
            response = await self.client.call("POST", "/tokenize", question)
        except HttpClientError as error:
            raise BenchError(f"/tokenize: {error}") from None
        if response.status != 200:
            raise BenchError(f"/tokenize: {_error_of(*response)}")
        answer = _object(response)
        tokens = answer.get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(t, int) for t in tokens):
            raise BenchError("/tokenize: the answer holds no list of tokens")
        count = answer.get("count", len(tokens))
        return tokens if len(tokens) == count else [0] * count

    def _body(self, prompt: BenchRequest, more: dict[str, Any]) -> bytes:
        return msgspec.json.encode(
            {
                "model": self.model,
                **_prompt_fields(prompt.body),
                "max_tokens": prompt.output_tokens,
                "temperature": 0.0,
                **more,
                **self._extra,
            }
        )


async def first_model(client: HttpClient) -> str:
    """The first model that the server offers. Raises BenchError."""
    try:
        response = await client.call("GET", "/v1/models")
    except HttpClientError as error:
        raise BenchError(str(error)) from None
    if response.status != 200:
        raise BenchError(f"/v1/models: {_error_of(*response)}")
    models = _object(response).get("data")
    if not isinstance(models, list) or not models or not isinstance(models[0], dict) or "id" not in models[0]:
        raise BenchError("/v1/models: the server offers no model; name one with --model")
    return str(models[0]["id"])


def _prompt_fields(body: PromptBody) -> dict[str, Any]:
    if isinstance(body, tuple):
        return {"messages": [{"role": role, "content": content} for role, content in body]}
    return {"prompt": body}


def _object(response: Response) -> dict[str, Any]:
    try:
        answer = msgspec.json.decode(response.body)
    except NOT_DECODED as error:
        raise BenchError(f"the answer is no JSON: {error}") from None
    if not isinstance(answer, dict):
        raise BenchError("the answer is no JSON object")
    return answer


def _error_of(status: int, body: bytes) -> str:
    try:
        error = msgspec.json.decode(body)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (*NOT_DECODED, KeyError, TypeError):
        text = body.decode(errors="replace")
    return f"HTTP {status}: {text[:ERROR_SHOWN]}"


def _failure(start: float, error: str) -> RequestOutcome:
    return RequestOutcome(start, time.perf_counter(), 0, 0, [], error)
