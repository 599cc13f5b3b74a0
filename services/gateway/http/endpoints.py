"""What answers each route but those that generate; API keys and errors of all.

Endpoints are plain ASGI: Starlette only routes to them, and nothing of it lies between a token and its socket.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

from starlette.types import Receive, Scope, Send

from services.gateway.api.anthropic.models import model_info, model_page
from services.gateway.api.encoding.lazy_json import LazyEncoder, packed_slices, text_slices
from services.gateway.api.errors import RequestError, abbreviated
from services.gateway.api.generation import choose_model
from services.gateway.core.api_keys import KeyScope
from services.gateway.database.records import DatabaseUnavailable
from services.gateway.http.access import AccessControl, check_model
from services.gateway.http.bodies.body_budget import BodyLimits
from services.gateway.http.body_parser import BodyKind, BodyParser
from services.gateway.http.call import OPENAI, ApiShape, Call
from services.gateway.overflow_provider import OverflowProvider
from services.gateway.peers import GatewayPeers, MetricsPages
from services.gateway.request_table import RequestTable
from services.gateway.tokenizer_client import Reply
from shared.ids import GatewayId, ModelName
from shared.messages.gateway import GatewayOverview, ReadOverview
from shared.messages.model_card import LoraCard, ModelCard
from shared.messages.tokenizer import DecodeReply, EncodeReply
from shared.packing import count
from shared.telemetry.metrics import OPENMETRICS, TEXT, wants_openmetrics
from shared.telemetry.tracing import CLIENT_REQUEST, RESPONSE, TRACING, RequestSpan

log = logging.getLogger(__name__)

VERSION = version("baton-serve")


Handler = Callable[[Call], Awaitable[None]]


class Endpoint:
    """One route as an ASGI application. An `RequestError` becomes an error response. A bug is logged and becomes a
    500, as one client's request must not end the streams of all others."""

    def __init__(
        self,
        handler: Handler,
        path: str,
        scope: KeyScope | None,
        access: AccessControl,
        limits: BodyLimits,
        shape: ApiShape = OPENAI,
        *,
        counted: bool = True,
        takes_media: Callable[[], bool] = lambda: False,
    ) -> None:
        """`path`: the route's, for audit lines. `scope`: what a client's key must allow; None: everybody may call it,
        and there are no audit lines. `counted`: whether calls for `inference` count for the limits of their key.
        `takes_media`: whether bodies may be as large as images, videos and sounds make them."""
        self._counted, self._takes_media = counted, takes_media
        self._handler, self._path, self._scope = handler, path, scope
        self._access, self._limits, self._shape = access, limits, shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request, as ASGI defines it."""
        limits = self._limits._replace(media=self._takes_media())
        call, began = Call(scope, receive, send, limits, self._shape), time.monotonic()
        if self._scope == "inference" and self._counted:
            call.span = TRACING.request(f"{scope['method']} {self._path}", call.headers.get(b"traceparent"))
        try:
            if self._scope is not None:
                self._access.admit(call, self._scope, counted=self._counted)
            await self._handler(call)
        except RequestError as error:
            # It knows the frames that it came through, which know its response, which knows it, and the body: all of
            # that would stay until Python looks through everything for cycles, which it seldom does.
            error.__traceback__ = None
            await call.refuse(error)
        except DatabaseUnavailable as error:
            log.warning("the database is away", extra={"path": self._path, "error": str(error)})
            await call.refuse(RequestError(503, "the database is away; try again", retry_after=1.0))
        finally:
            call.close()
            if self._scope is not None:
                self._access.finish(call, self._path, began)
            if call.span is not None:
                _end_span(call.span, call, self._path)


def _end_span(span: RequestSpan, call: Call, path: str) -> None:
    """With the names of OpenTelemetry's semantic conventions, those for generative models included."""
    record = call.record
    told = {
        "http.request.method": call.scope["method"],
        "http.route": path,
        "http.response.status_code": record.status,
        "gen_ai.request.model": record.model,
        RESPONSE: record.request,
        CLIENT_REQUEST: call.client_id,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "baton.outcome": record.outcome,
    }
    failed = record.outcome == "failed" or (record.status or 0) >= 500
    span.end(failed=failed, attributes={name: value for name, value in told.items() if value is not None})


class InfoEndpoints:
    """Answers everything but generation: models, tokens, health, metrics, version."""

    def __init__(
        self,
        table: RequestTable,
        parser: BodyParser,
        access: AccessControl,
        peers: GatewayPeers,
        provider: OverflowProvider | None = None,
    ) -> None:
        """`provider`: what answers requests that cannot be served here."""
        self._table, self._parser, self._access, self._peers = table, parser, access, peers
        self._provider = provider
        self._metrics = MetricsPages(peers, table.cluster.engines)

    async def live(self, call: Call) -> None:
        """`/live`: 200 as long as the process answers at all."""
        await call.respond_json({"status": "alive"})

    async def health(self, call: Call) -> None:
        """`/health`: 503 with the reason while new requests are refused as nobody can serve them, otherwise 200; also
        while engines sleep, which is no fault."""
        await self._respond_status(call, self._table.not_serving(though_asleep=False))

    async def ready(self, call: Call) -> None:
        """`/ready`: 503 with the reason while new requests are refused, otherwise 200; so while the overflow provider
        answers them. With `?model=NAME` while those for that model are, which a client must be allowed to use. Raises
        RequestError."""
        model = self._asked_model(call)
        reason = self._table.not_serving(model) if self._table.accepting else "this gateway is draining"
        if reason is not None and self._table.accepting and self._provider is not None and self._provider.usable:
            await call.respond_json({"status": "ok", "served_by": "overflow", "reason": reason})
            return
        missing = 0 if model is not None else self._table.models_not_serving()
        await self._respond_status(call, reason, {"models_not_served": missing} if missing else {})

    def _asked_model(self, call: Call) -> ModelName | None:
        """The model that a call of `/ready` is about; None: any. Its names are those of requests."""
        names = [value for name, value in call.query() if name == "model"]
        if not names:
            return None
        self._access.admit(call, "read-only")
        card = choose_model(names[0], self._table.cluster.models())
        check_model((ModelName(names[0]), card.name), call.key)
        return card.name

    async def _respond_status(self, call: Call, reason: str | None, more: dict[str, Any] | None = None) -> None:
        if reason is None:
            await call.respond_json({"status": "ok", **(more or {})})
        else:
            await call.respond_json({"status": "unavailable", "reason": reason}, 503, [(b"retry-after", b"1")])

    async def metrics(self, call: Call) -> None:
        """`/metrics`: of all gateways that share the port, and what engines reported last; in Prometheus' text format,
        or in OpenMetrics' where the client's `Accept` prefers that: it has exemplars."""
        accept = b",".join(value for name, value in call.scope["headers"] if name == b"accept").decode("latin-1")
        openmetrics = wants_openmetrics(accept)
        page = await self._metrics.page(openmetrics)
        await call.respond(page, content_type=(OPENMETRICS if openmetrics else TEXT).encode())

    async def load(self, call: Call) -> None:
        """vLLM's `/load`: the responses that are open at all gateways that share the port."""
        others: dict[GatewayId, GatewayOverview] = await self._peers.ask_all(ReadOverview(0), GatewayOverview)
        here = sum(1 for _ in self._table.open_responses())
        await call.respond_json({"server_load": here + sum(each.open_responses for each in others.values())})

    async def version(self, call: Call) -> None:
        """`/version`: of the installed package."""
        await call.respond_json({"version": VERSION})

    async def keys(self, call: Call) -> None:
        """`/admin/keys`: the keys by name, and what each may do."""
        await call.respond_json(self._access.keys())

    async def models(self, call: Call) -> None:
        """`/v1/models`: all models that are served and that the client may use."""
        shown = self._shown(call)
        page = model_page(shown, call.query()) if call.is_anthropic else {"object": "list", "data": shown}
        await call.respond_json(page)

    async def model(self, call: Call) -> None:
        """`/v1/models/NAME`. Raises RequestError 404."""
        name = call.scope["path_params"]["name"]
        found = [body for body in self._shown(call) if body["id"] == name]
        if not found:
            message = f"The model `{abbreviated(name)[1:-1]}` does not exist."
            raise RequestError(404, message, param="model", code="model_not_found")
        await call.respond_json(model_info(found[0]) if call.is_anthropic else found[0])

    def _shown(self, call: Call) -> list[dict[str, Any]]:
        """Models, adapters and aliases that the client may use; a key that names a model allows its aliases."""
        allows, shown = call.key.allows_model, list[dict[str, Any]]()
        for card in self._table.cluster.models():
            bodies = [_model_body(card), *(_lora_body(card, each) for each in card.loras)]
            shown += [body for body in bodies if allows(body["id"])]
            names = [alias for alias in card.aliases if allows(alias) or allows(card.name)]
            shown += [{**_model_body(card), "id": alias} for alias in names]
        return shown

    async def tokenize(self, call: Call) -> None:
        """`/tokenize`: the token ids of a text or of messages. Raises RequestError."""
        card, encoded = await ask_tokenizer(call, self._table, self._parser, "tokenize", EncodeReply)
        slices = encoded.string_slices
        answer = {
            "count": count(encoded.tokens),
            "max_model_len": card.max_model_len,
            "tokens": packed_slices(encoded.tokens),
            "token_strs": encoded.strings if slices is None else text_slices(slices),
        }
        await call.respond(await LazyEncoder().encode(answer))

    async def detokenize(self, call: Call) -> None:
        """`/detokenize`: the text of token ids. Raises RequestError."""
        _, decoded = await ask_tokenizer(call, self._table, self._parser, "detokenize", DecodeReply)
        await call.respond_json({"prompt": decoded.text})


async def ask_tokenizer(
    call: Call, table: RequestTable, parser: BodyParser, kind: BodyKind, reply_type: type[Reply]
) -> tuple[ModelCard, Reply]:
    """Has the body's question answered by a tokenizer of the model that it names. Raises RequestError."""
    card: ModelCard
    with table.arriving():
        card, question = await parser.read(kind, await call.body())
    call.record.model = card.name
    check_model((card.name, *card.aliases), call.key)
    return card, await call.unless_left(table.tokenizer.ask(card, question, reply_type))


def _model_body(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "baton",
        "root": card.name,
        "parent": None,
        "max_model_len": card.max_model_len,
        "permission": [],
    }


def _lora_body(card: ModelCard, lora: LoraCard) -> dict[str, Any]:
    """As vLLM shows an adapter: its parent is the model that it belongs to."""
    return {**_model_body(card), "id": lora.name, "root": lora.name, "parent": card.name}
