"""A batch's own engine: the offline one, with the gateway's own code, so that bodies are the server's."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Mapping
from typing import Any

from deploy.cli.batch.http_server import AnswerRequest
from deploy.errors import CommandError
from services.gateway.api.batches.lines import BatchAnswer, BatchRequest
from services.offline import LLM, EngineFailed, InvalidRequest


@contextlib.asynccontextmanager
async def offline_engine(model: str, settings: Mapping[str, Any]) -> AsyncIterator[AnswerRequest]:
    """Loads the model; `settings` are those of `LLM`. Raises CommandError."""
    llm = await _loaded(model, settings)

    async def ask(request: BatchRequest) -> BatchAnswer:
        try:
            answer = await llm.call("POST", request.url, request.body, request.id)
        except EngineFailed as error:
            raise CommandError(f"{error}; run the same command to go on") from None
        return BatchAnswer(answer.status, answer.request_id, answer.body)

    try:
        yield ask
    finally:
        llm.close()


async def _loaded(model: str, settings: Mapping[str, Any]) -> LLM:
    """Loads on a thread, so that Ctrl-C ends the wait at once; the thread is then abandoned."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[LLM] = loop.create_future()

    def load() -> None:
        try:
            llm = LLM(model, progress=False, **settings)
        except (EngineFailed, InvalidRequest) as error:
            loop.call_soon_threadsafe(ready.set_exception, CommandError(str(error)))
        else:
            loop.call_soon_threadsafe(ready.set_result, llm)

    threading.Thread(target=load, daemon=True).start()
    return await ready
