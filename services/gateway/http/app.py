"""The routes of the API, and the errors of requests that match no route."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.api.anthropic.answer import error_body as anthropic_error
from services.gateway.api.audio.request import Task
from services.gateway.api.errors import RequestError
from services.gateway.api.ollama.answer import AnswerShape
from services.gateway.api.ollama.answer import error_body as ollama_error
from services.gateway.audio.audio_decoder import AudioDecoder
from services.gateway.batches.file_store import FileStore
from services.gateway.core.api_keys import KeyScope
from services.gateway.http.access import AccessControl
from services.gateway.http.admin.fleet import FleetEndpoints
from services.gateway.http.admin.loras import LoraEndpoints
from services.gateway.http.admin.pauses import PauseEndpoints
from services.gateway.http.admin.sleeps import SleepEndpoints
from services.gateway.http.apis.anthropic import CountTokensEndpoint, MessagesEndpoint
from services.gateway.http.apis.audio import AudioEndpoint
from services.gateway.http.apis.background import BackgroundResponses
from services.gateway.http.apis.batches import BatchEndpoints
from services.gateway.http.apis.chat_batch import ChatBatchEndpoint
from services.gateway.http.apis.files import FileEndpoints
from services.gateway.http.apis.invocations import InvocationsEndpoint
from services.gateway.http.apis.ollama import OllamaEndpoint, OllamaInfo
from services.gateway.http.apis.responses import ResponsesEndpoint
from services.gateway.http.apis.sglang import SglangEndpoint
from services.gateway.http.apis.stored_responses import StoredResponseEndpoints
from services.gateway.http.body_parser import BodyParser
from services.gateway.http.call import BodyLimits
from services.gateway.http.endpoints import VERSION, Endpoint, Handler, InfoEndpoints
from services.gateway.http.generation import GenerationEndpoint, StreamSettings
from services.gateway.http.overflow import Overflow
from services.gateway.http.pages.console import Console
from services.gateway.http.pages.documentation import Documentation
from services.gateway.http.pooling import PooledEndpoint, PooledKind
from services.gateway.overflow_provider import OverflowProvider
from services.gateway.peers import GatewayPeers
from services.gateway.request_table import RequestTable
from services.gateway.resumable_streams import ResumableStreams
from shared.models.lora_registry import LoraRegistry

log = logging.getLogger(__name__)

SERVED = (
    "/v1/",
    "/invocations",
    "/v2/",
    "/api/",
    "/generate",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/tokenize",
    "/detokenize",
)
"""Beginnings of the paths that clients send requests to."""


def build_app(
    table: RequestTable,
    peers: GatewayPeers,
    streams: ResumableStreams,
    settings: StreamSettings,
    *,
    bodies: BodyLimits,
    parser: BodyParser,
    access: AccessControl,
    cors_origins: Sequence[str],
    fleet: FleetEndpoints,
    pauses: PauseEndpoints,
    sleeps: SleepEndpoints,
    provider: OverflowProvider | None = None,
    lora_registry: LoraRegistry | None = None,
    background: BackgroundResponses | None = None,
    file_store: FileStore | None = None,
    batches: BatchEndpoints,
    sounds: AudioDecoder,
    console: Console | None = None,
) -> Starlette:
    """Returns the ASGI application. `provider`: gets what cannot be served here in time. `lora_registry`: None: no
    adapter can be loaded at run time. `background`, `file_store`: None: there is no database. `sounds`: decodes them.
    `console`: None: it is switched off."""
    files = FileEndpoints(file_store, settings.read_timeout)
    loras = LoraEndpoints(table.cluster, lora_registry)
    documentation = Documentation()
    models = OllamaInfo(table, VERSION)
    info = InfoEndpoints(table, parser, access, peers, provider)
    overflow = (
        None if provider is None else Overflow(provider, table.cluster, access, settings.read_timeout, table.clusters)
    )

    chat_batch = ChatBatchEndpoint(table, parser, access, streams, settings)
    responses = ResponsesEndpoint(table, parser, access, streams, settings, background)
    stored = StoredResponseEndpoints(background, settings, table.timeout)

    def route(method: str, path: str, handler: Handler, scope: KeyScope | None) -> Route:
        return Route(path, Endpoint(handler, path, scope, access, bodies), methods=[method])

    def generation(kind: Literal["chat", "completion"]) -> Handler:
        return GenerationEndpoint(table, kind, parser, access, streams, settings, overflow)

    def of_key(method: str, path: str, handler: Handler) -> Route:
        return Route(path, Endpoint(handler, path, "inference", access, bodies, counted=False), methods=[method])

    def anthropic(path: str, handler: Handler) -> Route:
        return Route(path, Endpoint(handler, path, "inference", access, bodies, anthropic_error), methods=["POST"])

    def ollama(method: str, path: str, handler: Handler, scope: KeyScope = "read-only") -> Route:
        return Route(path, Endpoint(handler, path, scope, access, bodies, ollama_error), methods=[method])

    def ollama_generation(shape: AnswerShape) -> Handler:
        return OllamaEndpoint(shape, table, parser, access, streams, settings)

    def audio(task: Task) -> Handler:
        return AudioEndpoint(task, table, access, settings, sounds)

    def pooled(kind: PooledKind) -> Handler:
        return PooledEndpoint(kind, table, parser, access, settings.read_timeout)

    invoked = InvocationsEndpoint(table, parser, generation, pooled)
    pages = (
        []
        if console is None
        else [
            route("GET", "/console", console.page, None),
            route("GET", "/console/events", console.events, "admin"),
            route("GET", "/console/prefixes", fleet.prefixes, "admin"),
            route("GET", "/console/requests/{request}", console.request, "admin"),
            route("GET", "/console/engines/{engine}", console.engine, "admin"),
            route("GET", "/console/{name}", console.asset, None),
        ]
    )
    return Starlette(
        routes=[
            route("POST", "/v1/chat/completions", generation("chat"), "inference"),
            route("POST", "/v1/chat/completions/batch", chat_batch, "inference"),
            route("POST", "/v1/completions", generation("completion"), "inference"),
            route("POST", "/v1/audio/transcriptions", audio("transcribe"), "inference"),
            route("POST", "/v1/audio/translations", audio("translate"), "inference"),
            route("POST", "/v1/responses", responses, "inference"),
            route("POST", "/v1/responses/input_tokens", responses.input_tokens, "inference"),
            route("GET", "/v1/responses/{id}", stored.get, "read-only"),
            route("DELETE", "/v1/responses/{id}", stored.delete, "inference"),
            route("POST", "/v1/responses/{id}/cancel", stored.cancel, "inference"),
            route("GET", "/v1/responses/{id}/input_items", stored.input_items, "read-only"),
            anthropic("/v1/messages", MessagesEndpoint(table, parser, access, streams, settings)),
            anthropic("/v1/messages/count_tokens", CountTokensEndpoint(table, parser, access)),
            ollama("POST", "/api/chat", ollama_generation("chat"), "inference"),
            ollama("POST", "/api/generate", ollama_generation("generate"), "inference"),
            ollama("GET", "/api/tags", models.tags),
            ollama("GET", "/api/ps", models.running),
            ollama("POST", "/api/show", models.show),
            ollama("GET", "/api/version", models.version),
            route("POST", "/generate", SglangEndpoint(table, parser, access, streams, settings), "inference"),
            route("POST", "/v1/embeddings", pooled("embedding"), "inference"),
            route("POST", "/pooling", pooled("pooling"), "inference"),
            route("POST", "/classify", pooled("classification"), "inference"),
            route("POST", "/score", pooled("score"), "inference"),
            route("POST", "/v1/score", pooled("score"), "inference"),
            route("POST", "/rerank", pooled("rerank"), "inference"),
            route("POST", "/v1/rerank", pooled("rerank"), "inference"),
            route("POST", "/v2/rerank", pooled("cohere_rerank"), "inference"),
            of_key("POST", "/v1/files", files.create),
            of_key("GET", "/v1/files", files.list),
            of_key("GET", "/v1/files/{name}", files.retrieve),
            of_key("DELETE", "/v1/files/{name}", files.delete),
            of_key("GET", "/v1/files/{name}/content", files.content),
            of_key("POST", "/v1/batches", batches.create),
            of_key("GET", "/v1/batches", batches.list),
            of_key("GET", "/v1/batches/{name}", batches.retrieve),
            of_key("POST", "/v1/batches/{name}/cancel", batches.cancel),
            route("POST", "/tokenize", info.tokenize, "inference"),
            route("POST", "/detokenize", info.detokenize, "inference"),
            route("GET", "/v1/models", info.models, "read-only"),
            route("GET", "/v1/models/{name:path}", info.model, "read-only"),
            route("GET", "/version", info.version, "read-only"),
            route("GET", "/load", info.load, "read-only"),
            route("GET", "/openapi.json", info.openapi, None),
            route("GET", "/admin/keys", info.keys, "admin"),
            route("POST", "/admin/drain", fleet.drain, "admin"),
            route("POST", "/admin/undrain", fleet.undrain, "admin"),
            route("POST", "/admin/scale", fleet.scale_pool, "admin"),
            route("POST", "/admin/strike", fleet.strike, "admin"),
            route("POST", "/v1/load_lora_adapter", loras.load, "admin"),
            route("POST", "/v1/unload_lora_adapter", loras.unload, "admin"),
            route("POST", "/reset_prefix_cache", fleet.reset_prefix_cache, "admin"),
            route("POST", "/flush_cache", fleet.reset_prefix_cache, "admin"),
            route("POST", "/abort_requests", fleet.abort_requests, "admin"),
            route("POST", "/scale_elastic_ep", fleet.scale, "admin"),
            route("POST", "/is_scaling_elastic_ep", fleet.is_scaling, "admin"),
            route("POST", "/pause", pauses.pause, "admin"),
            route("POST", "/resume", pauses.resume, "admin"),
            route("POST", "/sleep", sleeps.sleep, "admin"),
            route("POST", "/wake_up", sleeps.wake_up, "admin"),
            route("POST", "/release_memory_occupation", sleeps.release_memory, "admin"),
            route("POST", "/resume_memory_occupation", sleeps.resume_memory, "admin"),
            route("GET", "/is_sleeping", sleeps.is_sleeping, "admin"),
            route("GET", "/is_paused", pauses.is_paused, "admin"),
            route("POST", "/pause_generation", pauses.pause_generation, "admin"),
            route("POST", "/continue_generation", pauses.continue_generation, "admin"),
            route("GET", "/server_info", fleet.server_info, "admin"),
            *pages,
            route("GET", "/docs", documentation.page, None),
            route("GET", "/docs/{name}", documentation.asset, None),
            route("GET", "/health", info.health, None),
            route("GET", "/ping", info.health, None),
            route("POST", "/ping", info.health, None),
            route("GET", "/live", info.live, None),
            route("GET", "/ready", info.ready, None),
            route("GET", "/metrics", info.metrics, None),
            route("POST", "/invocations", invoked, "inference"),
        ],
        middleware=_cors(cors_origins),
        exception_handlers={HTTPException: _not_found, Exception: _bug},
    )


def _cors(origins: Sequence[str]) -> list[Middleware]:
    if not origins:
        return []
    return [Middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])]


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path[:200]}: {error.detail}"
    if error.status_code == 404:
        text += f"; served are {', '.join(_paths(request.app))}"
    return _response(RequestError(error.status_code, text), error.headers)


def _paths(app: Starlette) -> list[str]:
    """The paths that clients send requests to, for the text of a 404."""
    paths = (route.path for route in app.routes if isinstance(route, Route))
    served = [path for path in dict.fromkeys(paths) if path.startswith(SERVED)]
    return [path for path in served if "{" not in path]


async def _bug(request: Request, error: Exception) -> Response:
    log.error("bug in an endpoint", exc_info=error, extra={"path": request.url.path})
    return _response(RequestError(500, "internal error"), None)


def _response(error: RequestError, headers: object) -> Response:
    return Response(error.body(), error.status, dict(headers or {}), "application/json")  # type: ignore[call-overload]
