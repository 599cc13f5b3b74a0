"""`/docs`: a page in which people read and try the API. It shows `/openapi.json`, and needs nothing of the internet."""

from __future__ import annotations

import gzip
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from services.gateway.api.errors import RequestError, abbreviated
from services.gateway.http.call import Call

ASSETS = {
    "swagger-ui-bundle.js": b"text/javascript; charset=utf-8",
    "swagger-ui.css": b"text/css; charset=utf-8",
    "start.js": b"text/javascript; charset=utf-8",
}
POLICY = b"default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'"
"""What the page may load: of this server only. Swagger UI sets styles of its own."""


class StaticFile(NamedTuple):
    """A file's bytes as they are sent to clients that take gzip, and to others."""

    content: bytes
    packed: bytes | None
    """None: it is not packed."""


class Documentation:
    """Serves the page and what it loads."""

    async def page(self, call: Call) -> None:
        """`/docs`."""
        headers = [(b"content-security-policy", POLICY)]
        await call.respond(_file("index.html").content, content_type=b"text/html; charset=utf-8", headers=headers)

    async def asset(self, call: Call) -> None:
        """`/docs/NAME`. Raises RequestError 404."""
        name = call.scope["path_params"]["name"]
        if name not in ASSETS:
            raise RequestError(404, f"there is no {abbreviated(name)}")
        file = _file(name)
        headers = [(b"cache-control", b"max-age=3600"), (b"vary", b"accept-encoding")]
        body = file.content
        if file.packed is not None and b"gzip" in call.headers.get(b"accept-encoding", b""):
            headers.append((b"content-encoding", b"gzip"))
            body = file.packed
        await call.respond(body, content_type=ASSETS[name], headers=headers)


@cache
def _file(name: str) -> StaticFile:
    """Read once: there are few of them."""
    folder = files("services.gateway.http.swagger_ui")
    if (packed := folder / f"{name}.gz").is_file():
        content = packed.read_bytes()
        return StaticFile(gzip.decompress(content), content)
    return StaticFile((folder / name).read_bytes(), None)
