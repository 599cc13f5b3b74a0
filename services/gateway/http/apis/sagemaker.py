"""SageMaker's endpoint, `/invocations`: it stands for the others, and the body says for which."""

from __future__ import annotations

from collections.abc import Mapping

from services.gateway.api.prompts import InvocationKind
from services.gateway.http.body_parser import BodyParser
from services.gateway.http.call import Call
from services.gateway.http.endpoints import Handler
from services.gateway.request_table import RequestTable


class InvocationsEndpoint:
    """Passes each call on to the endpoint that its body is for."""

    def __init__(self, table: RequestTable, parser: BodyParser, handlers: Mapping[InvocationKind, Handler]) -> None:
        self._table, self._parser, self._handlers = table, parser, handlers

    async def __call__(self, call: Call) -> None:
        """Responds as that endpoint does. Raises RequestError."""
        with self._table.arriving():
            kind: InvocationKind = await self._parser.read("invocation", await call.body())
        await self._handlers[kind](call)
