"""A tiny OpenAI-compatible server that streams words at a fixed pace, for tests and measurements of load generators.

Honest about what it counts: one token a word of the prompt (plus four a chat message), or one an id.
"""

from __future__ import annotations

import asyncio
import json
from itertools import takewhile
from typing import Any

HEAD = b"HTTP/1.1 %d X\r\nContent-Type: %b\r\n"


class FakeOpenAI:
    """Owns a listening socket and the requests of its clients."""

    def __init__(
        self, interval: float = 0.0, fail_every: int | None = None, prefix_cache: bool = False, verbose: bool = False
    ) -> None:
        """`prefix_cache`: usage tells how much of the prompt was in an earlier one. `verbose`: answers differ."""
        self.interval = interval
        self.fail_every = fail_every
        self.prefix_cache = prefix_cache
        self.verbose = verbose
        self._seen: list[list[Any]] = []
        self.bodies: list[dict[str, Any]] = []
        self.concurrent = self.most_concurrent = 0
        self.connections = 0

    async def __aenter__(self) -> FakeOpenAI:
        self._server = await asyncio.start_server(self._client, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path, _ = head.split(" ", 2)
                length = next((int(x[15:]) for x in head.lower().split("\r\n") if x.startswith("content-length:")), 0)
                body = json.loads(await reader.readexactly(length)) if length else {}
                await self._answer(method, path, body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, method: str, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            return self._json(writer, {"data": [{"id": "fake", "object": "model"}]})
        if path == "/tokenize":
            if body.get("prompt") == "":
                return self._json(writer, {"error": {"message": "prompt: at least one token is needed"}}, 400)
            return self._json(writer, {"count": count(body), "tokens": token_ids(body), "max_model_len": 4096})
        self.bodies.append(body)
        if self.fail_every and len(self.bodies) % self.fail_every == 0:
            return self._json(writer, {"error": {"message": "told to fail", "type": "server_error"}}, 503)
        self.concurrent += 1
        self.most_concurrent = max(self.most_concurrent, self.concurrent)
        try:
            if body.get("stream"):
                return await self._stream(body, "chat" in path, writer)
            await asyncio.sleep(self.interval * body["max_tokens"])
            usage = {"prompt_tokens": count(body), "completion_tokens": body["max_tokens"]}
            return self._json(writer, {"choices": [{"text": "w", "finish_reason": "length"}], "usage": usage})
        finally:
            self.concurrent -= 1

    def _cached(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self.prefix_cache:
            return {}
        prompt = pieces(body)
        longest = max((common(prompt, seen) for seen in self._seen), default=0)
        self._seen.append(prompt)
        return {"prompt_tokens_details": {"cached_tokens": longest}}

    def _json(self, writer: asyncio.StreamWriter, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        writer.write(HEAD % (status, b"application/json") + b"Content-Length: %d\r\n\r\n" % len(body) + body)

    async def _stream(self, body: dict[str, Any], chat: bool, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD % (200, b"text/event-stream") + b"Transfer-Encoding: chunked\r\n\r\n")
        wanted, number, cached = body["max_tokens"], len(self.bodies), self._cached(body)
        if chat:
            self._event(writer, chunk({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}))
        for i in range(wanted):
            if self.interval:
                await asyncio.sleep(self.interval)
            word = f" said{number}-{i}" if self.verbose else " word"
            text = {"delta": {"content": word}} if chat else {"text": word}
            finish = "length" if i == wanted - 1 and not chat else None
            self._event(writer, chunk({**text, "finish_reason": finish}))
            await writer.drain()
        if chat:
            self._event(writer, chunk({"delta": {}, "finish_reason": "length"}))
        usage = {"prompt_tokens": count(body), "completion_tokens": wanted, **cached}
        self._event(writer, json.dumps({"id": "x", "choices": [], "usage": usage}))
        self._event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _event(self, writer: asyncio.StreamWriter, data: str) -> None:
        frame = f"data: {data}\n\n".encode()
        writer.write(b"%x\r\n%b\r\n" % (len(frame), frame))


def chunk(choice: dict[str, Any]) -> str:
    fields = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1700000000, "model": "fake"}
    return json.dumps({**fields, "choices": [{"index": 0, "logprobs": None, **choice}]})


def count(body: dict[str, Any]) -> int:
    if "messages" in body:
        return sum(4 + len(str(m["content"]).split()) for m in body["messages"]) + 3
    prompt = body["prompt"]
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


def token_ids(body: dict[str, Any]) -> list[int]:
    text = body.get("prompt") if isinstance(body.get("prompt"), str) else ""
    return [sum(word.encode()) % 1000 for word in (text or "").split()]


def pieces(body: dict[str, Any]) -> list[Any]:
    """What `count` counts: the prompt's tokens."""
    if "messages" in body:
        return [piece for m in body["messages"] for piece in ["<", m["role"], ">", *m["content"].split(), "\n"]]
    prompt = body["prompt"]
    return prompt.split() if isinstance(prompt, str) else list(prompt)


def common(one: list[Any], other: list[Any]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
