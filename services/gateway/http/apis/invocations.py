"""SageMaker's endpoint, `/invocations`: it stands for the others, and the body says for which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from services.gateway.api.prompts import InvocationKind
from services.gateway.http.body_parser import BodyParser
from services.gateway.http.call import Call
from services.gateway.http.endpoints import Handler
from services.gateway.http.pooling import PooledKind
from services.gateway.request_table import RequestTable


class InvocationsEndpoint:
    """Passes each call on to the endpoint that its body is for."""

    def __init__(
        self,
        table: RequestTable,
        parser: BodyParser,
        generation: Callable[[Literal["chat", "completion"]], Handler],
        pooled: Callable[[PooledKind], Handler],
    ) -> None:
        """`generation`, `pooled`: what makes the endpoints."""
        self._table, self._parser = table, parser
        self._handlers: Mapping[InvocationKind, Handler] = {
            "chat": generation("chat"),
            "completion": generation("completion"),
            "embedding": pooled("embedding"),
            "classification": pooled("classification"),
            "score": pooled("score"),
            "rerank": pooled("rerank"),
        }

    async def __call__(self, call: Call) -> None:
        """Responds as that endpoint does. Raises RequestError."""
        with self._table.arriving():
            kind: InvocationKind = await self._parser.read("invocation", await call.body())
        await self._handlers[kind](call)
