"""Answers requests for vectors of prompts: one prefill for each prompt, and one body at the end."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Literal

from msgspec.structs import replace

from services.gateway.api.pooling.pooled_request import PooledRequest
from services.gateway.api.response import GenerationResponse, ResponseWriter, prompt_tokens
from services.gateway.http.access import AccessControl
from services.gateway.http.body_parser import BodyParser
from services.gateway.http.call import Call
from services.gateway.http.generation import new_header
from services.gateway.request_table import RequestTable

log = logging.getLogger(__name__)

BYTES_AT_ONCE = 128 * 1024
"""Of vectors that are encoded before other requests have their turn: 32,768 numbers in JSON take about 3 ms."""
LARGE_ANSWER = 2**20
"""Bytes of vectors from which on an answer counts for what bodies may hold together..."""
ANSWER_SHARE = 11
"""...as so many times their bytes: as JSON, and once more while it is joined."""

PooledKind = Literal[
    "embedding",
    "pooling",
    "classification",
    "score",
    "rerank",
    "cohere_rerank",
    "cohere_embed",
    "ollama_embed",
    "ollama_embeddings",
]

_PREFIXES: dict[PooledKind, str] = {
    "embedding": "embd",
    "pooling": "pool",
    "classification": "classify",
    "score": "score",
    "rerank": "rerank",
    "cohere_rerank": "rerank",
    "cohere_embed": "embd",
    "ollama_embed": "embd",
    "ollama_embeddings": "embd",
}
"""What the ids of responses begin with."""


class PooledEndpoint:
    """Every prompt is a request of its own, so they are computed by several engines, and retried one by one."""

    def __init__(
        self, kind: PooledKind, table: RequestTable, parser: BodyParser, access: AccessControl, read_timeout: float
    ) -> None:
        """`read_timeout`: seconds that a client may take to read the response."""
        self._kind = kind
        self._table, self._parser, self._access, self._read_timeout = table, parser, access, read_timeout

    async def __call__(self, call: Call) -> None:
        """Computes and responds. Raises RequestError."""
        table = self._table
        with table.arriving():
            asked: PooledRequest = await self._parser.read(self._kind, await call.body())
        generation = asked.generation
        call.record.model = generation.served_name
        generation = replace(self._access.bound(generation, call.key), trace=call.trace)
        table.admit(generation.sequences, generation.model.name)
        self._access.reserve(call, generation, table.free)
        header = new_header(generation, _PREFIXES[self._kind])._replace(prompt_field=asked.prompt_field)
        call.name_request(header.id)
        extra = {"request": header.id, "client_request": call.client_id, "endpoint": header.kind}
        log.info("request", extra={**extra, "model": header.model, "choices": generation.sequences, "stream": False})
        response = await table.open(generation, header, ResponseWriter(), [])
        await self._wait(call, response)
        if response.error is not None:
            raise response.error
        if response.ended.result() != "finished":
            return
        size = sum(len(choice.vector) for choice in response.choices)
        if size >= LARGE_ANSWER:
            await call.hold(ANSWER_SHARE * size)
        elements: list[Any] = []
        encoded, share = 0, size // asked.elements
        for number in range(asked.elements):
            elements.append(asked.element(number, response.choices))
            encoded += share
            if encoded >= BYTES_AT_ONCE:
                encoded = 0
                await asyncio.sleep(0)
        try:
            async with asyncio.timeout(self._read_timeout):
                await call.respond(asked.body(header, response.choices, elements))
        except TimeoutError:
            call.connection.abort()

    async def _wait(self, call: Call, response: GenerationResponse) -> None:
        """Returns when the response has ended; it does when the client leaves, too."""
        connection = call.connection
        try:
            connection.on_lost = lambda: response.end("client left")
            if connection.is_closing():
                response.end("client left")
            await response.ended
        finally:
            connection.on_lost = None
            outcome = response.ended.result() if response.ended.done() else "client left"
            await self._table.close(response, outcome)
            call.record.outcome = outcome
            call.record.prompt_tokens = prompt_tokens(response.choices)
