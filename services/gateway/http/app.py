"""The ASGI application: its middleware, and the errors of requests that match no route."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.api.errors import RequestError
from services.gateway.http.call import ApiShape
from services.gateway.http.routes import ANTHROPIC, EndpointParts, all_routes, shape_of

log = logging.getLogger(__name__)

SERVED = (
    "/v1/",
    "/invocations",
    "/v2/",
    "/cohere/",
    "/api/",
    "/generate",
    "/generative_scoring",
    "/inference/v1/generate",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/tokenize",
    "/detokenize",
)
"""Beginnings of the paths that clients send requests to."""


def build_app(parts: EndpointParts, cors_origins: Sequence[str]) -> Starlette:
    """Returns the ASGI application. `cors_origins`: sites whose pages may call it from a browser."""
    return Starlette(
        routes=all_routes(parts),
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
    shape = ANTHROPIC if "anthropic-version" in request.headers else shape_of(request.url.path)
    return _refusal(shape, RequestError(error.status_code, text), secrets.token_hex(16), error.headers)


def _refusal(shape: ApiShape, error: RequestError, named: str, headers: Mapping[str, str] | None = None) -> Response:
    """`named`: what the request is called."""
    ids = {name.decode(): named for name in shape.id_headers}
    return Response(shape.error_body(error, named), error.status, {**(headers or {}), **ids}, "application/json")


def _paths(app: Starlette) -> list[str]:
    """The paths that clients send requests to, for the text of a 404."""
    paths = (route.path for route in app.routes if isinstance(route, Route))
    served = [path for path in dict.fromkeys(paths) if path.startswith(SERVED)]
    return [path for path in served if "{" not in path]


async def _bug(request: Request, error: Exception) -> Response:
    named = secrets.token_hex(16)
    log.error("bug in an endpoint", exc_info=error, extra={"path": request.url.path, "request": named})
    return _refusal(shape_of(request.url.path), RequestError(500, "internal error"), named)
