"""The routes, and what holds for each: keys, and errors as OpenAI's clients expect them.

Endpoints are plain ASGI: Starlette finds them, and nothing of it lies between a token and its socket.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from services.gateway.api.chat import read_chat
from services.gateway.api.completions import read_completion
from services.gateway.api.errors import ApiError
from services.gateway.api.job import Job, Limits
from services.gateway.desk import Desk
from services.gateway.http.call import Call
from services.gateway.http.generate import Generate, StreamSettings
from services.gateway.http.pages import Pages
from services.gateway.tools.plan import ParserChoice
from shared.messages.lifecycle import ModelCard

log = logging.getLogger(__name__)

Answer = Callable[[Call], Awaitable[None]]


class Endpoint:
    """One route as an ASGI application. A refusal becomes an error response; a bug is logged and becomes a 500, as a
    single client's request must not end the streams of all others."""

    def __init__(self, answer: Answer, keys: Sequence[bytes]) -> None:
        self._answer, self._keys = answer, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(scope, receive, send)
        try:
            self._authorize(call)
            await self._answer(call)
        except ApiError as error:
            await call.refuse(error)

    def _authorize(self, call: Call) -> None:
        """Compares with every key, in the same time whichever fits."""
        if not self._keys:
            return
        scheme, _, given = (call.header(b"authorization") or b"").partition(b" ")
        fits = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        if scheme.lower() != b"bearer" or not any(fits):
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")


def build_app(
    desk: Desk,
    settings: StreamSettings,
    *,
    max_body: int,
    keys: Sequence[str],
    cors_origins: Sequence[str],
    parsers: ParserChoice,
) -> Starlette:
    pages = Pages(desk, max_body)
    secrets = [key.encode() for key in keys]

    def chat(body: bytes, cards: list[ModelCard], limits: Limits) -> Job:
        return read_chat(body, cards, limits, lambda name: parsers.of(desk.ring.dialect(name)))

    def route(method: str, path: str, answer: Answer, *, free: bool = False) -> Route:
        return Route(path, Endpoint(answer, () if free else secrets), methods=[method])

    return Starlette(
        routes=[
            route("POST", "/v1/chat/completions", Generate(desk, chat, settings, max_body)),
            route("POST", "/v1/completions", Generate(desk, read_completion, settings, max_body)),
            route("GET", "/v1/models", pages.models),
            route("GET", "/v1/models/{name:path}", pages.model),
            route("POST", "/tokenize", pages.tokenize),
            route("POST", "/detokenize", pages.detokenize),
            route("GET", "/version", pages.version),
            route("GET", "/health", pages.health, free=True),
            route("GET", "/ping", pages.health, free=True),
            route("POST", "/ping", pages.health, free=True),
            route("GET", "/live", pages.live, free=True),
            route("GET", "/ready", pages.ready, free=True),
            route("GET", "/metrics", pages.metrics, free=True),
        ],
        middleware=_cors(cors_origins),
        exception_handlers={HTTPException: _not_routed, Exception: _bug},
    )


def _cors(origins: Sequence[str]) -> list[Middleware]:
    if not origins:
        return []
    return [Middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])]


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    wording = f"{request.method} {request.url.path[:200]}: {error.detail}"
    if error.status_code == 404:
        wording += f"; served are {', '.join(_paths(request.app))}"
    return _response(ApiError(error.status_code, wording), error.headers)


def _paths(app: Starlette) -> list[str]:
    """Where requests of clients go; what they look for and is not here, this model cannot do."""
    paths = (route.path for route in app.routes if isinstance(route, Route))
    served = [path for path in dict.fromkeys(paths) if path.startswith(("/v1/", "/tokenize", "/detokenize"))]
    return [path for path in served if "{" not in path]


async def _bug(request: Request, error: Exception) -> Response:
    log.error("bug in an endpoint", exc_info=error, extra={"path": request.url.path})
    return _response(ApiError(500, "internal error"), None)


def _response(error: ApiError, headers: object) -> Response:
    return Response(error.body(), error.status, dict(headers or {}), "application/json")  # type: ignore[call-overload]
