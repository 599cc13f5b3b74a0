"""An OpenAI-compatible provider on a real port, for tests of overflow; how it behaves is set at any time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

from starlette.types import Receive, Scope, Send

from services.gateway.http.server import HttpServer

Behaviour = Literal["answers", "silent", "breaks off", "holds", "error event"]
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
CHUNKS = ("Lyon", " is", " nice")


class FakeProvider:
    """Owns what it was asked."""

    def __init__(self) -> None:
        self.behaviour: Behaviour = "answers"
        self.status = 200
        self.headers: list[dict[str, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self.sent = b""
        """The bytes of its last answer."""
        self.left = 0
        """Requests that were given up before their answer was complete."""
        self.hold = asyncio.Event()
        """What "holds" goes on, in the middle of its answer, when it is set."""
        self.server = HttpServer(self, "127.0.0.1", 0, reuse_port=False, max_connections=100, certificates=None)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}/v1"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        self.bodies.append(json.loads(body))
        if self.behaviour == "silent":
            await self._until_it_leaves(receive)
            return
        self.sent = b""
        stream = self.bodies[-1].get("stream", False)
        kind = b"text/event-stream" if stream and self.status == 200 else b"application/json"
        await send({"type": "http.response.start", "status": self.status, "headers": [(b"content-type", kind)]})
        if self.status != 200:
            await self._send(send, b'{"error":{"message":"it quotes sk-secret"}}', last=True)
        elif stream:
            await self._stream(receive, send)
        else:
            choice = {"index": 0, "message": {"role": "assistant", "content": "".join(CHUNKS)}, "finish_reason": "stop"}
            answer = {"id": "x", "object": "chat.completion", "created": 1, "model": "theirs", "choices": [choice]}
            await self._send(send, json.dumps({**answer, "usage": USAGE}).encode(), last=True)

    async def _stream(self, receive: Receive, send: Send) -> None:
        head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "theirs"}
        if self.behaviour == "error event":
            await self._send(send, b'data: {"error":{"message":"no"}}\n\n', last=True)
            return
        for number, text in enumerate(CHUNKS):
            if number == 2 and self.behaviour == "holds":
                gone = asyncio.create_task(self._until_it_leaves(receive))
                going = asyncio.create_task(self.hold.wait())
                await asyncio.wait((gone, going), return_when=asyncio.FIRST_COMPLETED)
                going.cancel()
                if gone.done():
                    return
                gone.cancel()
            if number == 2 and self.behaviour == "breaks off":
                raise ConnectionAbortedError  # uvicorn closes the connection without the last chunk
            choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
            await self._event(send, {**head, "choices": [choice], "usage": None})
        await self._event(
            send, {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": None}
        )
        await self._event(send, {**head, "choices": [], "usage": USAGE})
        await self._send(send, b"data: [DONE]\n\n", last=True)

    async def _event(self, send: Send, value: Any) -> None:
        await self._send(send, b"data: " + json.dumps(value).encode() + b"\n\n")

    async def _send(self, send: Send, data: bytes, *, last: bool = False) -> None:
        self.sent += data
        await send({"type": "http.response.body", "body": data, "more_body": not last})

    async def _until_it_leaves(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left += 1


@asynccontextmanager
async def fake_provider() -> AsyncIterator[FakeProvider]:
    provider = FakeProvider()
    await provider.server.listen()
    try:
        yield provider
    finally:
        await provider.server.close(1.0)
