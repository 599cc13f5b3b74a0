"""Reads server-sent events with their ids, as a client does that resumes streams. The `openai` SDK hides the ids."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2

Event = tuple[str | None, Any]
"""An event's id and its data."""


async def events(
    http: httpx2.AsyncClient, request: dict[str, Any] | None, last: str | None = None, **headers: str
) -> AsyncIterator[Event]:
    """The events of a stream with their ids."""
    if last is not None:
        headers["Last-Event-ID"] = last
    async with http.stream("POST", "/v1/chat/completions", json=request, headers=headers) as answer:
        if answer.status_code != 200:
            await answer.aread()
            answer.raise_for_status()
        unread = b""
        async for part in answer.aiter_bytes():
            *blocks, unread = (unread + part).split(b"\n\n")
            for block in blocks:
                fields = dict(line.split(b": ", 1) for line in block.split(b"\n"))
                if data := fields.get(b"data"):
                    name = fields.get(b"id")
                    yield name and name.decode(), "[DONE]" if data == b"[DONE]" else json.loads(data)


def last_id(seen: list[Event]) -> str:
    return next(name for name, _ in reversed(seen) if name is not None)
