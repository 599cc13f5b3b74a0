"""Answers `/v1/embeddings`: one prefill for each input, and one body at the end."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time

from services.gateway.api.embeddings import EmbeddingRequest, embedding_body, encode_embedding
from services.gateway.api.response import GenerationResponse, ResponseHeader, ResponseWriter, prompt_tokens
from services.gateway.http.access import AccessControl
from services.gateway.http.body_parser import BodyParser
from services.gateway.http.call import Call
from services.gateway.request_table import RequestTable

log = logging.getLogger(__name__)

VECTORS_AT_ONCE = 8
"""Vectors that are encoded before other requests have their turn: 32,768 numbers in JSON take about 3 ms."""


class EmbeddingEndpoint:
    """Every input is a request of its own, so they are computed by several engines, and retried one by one."""

    def __init__(self, table: RequestTable, parser: BodyParser, access: AccessControl, read_timeout: float) -> None:
        """`read_timeout`: seconds that a client may take to read the response."""
        self._table, self._parser, self._access, self._read_timeout = table, parser, access, read_timeout

    async def __call__(self, call: Call) -> None:
        """Computes and responds. Raises RequestError."""
        table = self._table
        with table.arriving():
            asked: EmbeddingRequest = await self._parser.read("embedding", await call.body())
        generation = asked.generation
        call.record.model = generation.model.name
        generation = self._access.bound(generation, call.key)
        table.admit(generation.sequences, generation.model.name)
        self._access.reserve(call, generation, table.free)
        header = ResponseHeader("embedding", f"embd-{secrets.token_hex(12)}", int(time.time()), generation.model.name)
        call.record.request = header.id
        extra = {"request": header.id, "client_request": call.client_id, "endpoint": header.kind}
        log.info("request", extra={**extra, "model": header.model, "choices": generation.sequences, "stream": False})
        response = await table.open(generation, header, ResponseWriter(), [])
        await self._wait(call, response)
        if response.error is not None:
            raise response.error
        if response.ended.result() != "finished":
            return
        data = []
        for number, choice in enumerate(response.choices, 1):
            data.append(encode_embedding(choice, asked.encoding))
            if number % VECTORS_AT_ONCE == 0:
                await asyncio.sleep(0)
        try:
            async with asyncio.timeout(self._read_timeout):
                await call.respond(embedding_body(header, response.choices, data))
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
