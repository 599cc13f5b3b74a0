"""`/docs`: a page in which people read and try the API. It shows `/openapi.json`, and needs nothing of the internet."""

from __future__ import annotations

from services.gateway.api.errors import RequestError, abbreviated
from services.gateway.api.openapi import openapi_page
from services.gateway.http.call import Call
from services.gateway.http.endpoints import VERSION
from services.gateway.http.pages.static_files import HTML, StaticFiles

ASSETS = {
    "swagger-ui-bundle.js": b"text/javascript; charset=utf-8",
    "swagger-ui.css": b"text/css; charset=utf-8",
    "start.js": b"text/javascript; charset=utf-8",
}
POLICY = b"default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'"
"""What the page may load: of this server only. Swagger UI sets styles of its own."""
PAGE = StaticFiles("services.gateway.http.swagger_ui")


class Documentation:
    """Serves the page and what it loads."""

    async def openapi(self, call: Call) -> None:
        """`/openapi.json`: the description of this API."""
        await call.respond(openapi_page(VERSION))

    async def page(self, call: Call) -> None:
        """`/docs`."""
        headers = [(b"content-security-policy", POLICY)]
        await call.respond(PAGE.file("index.html").content, content_type=HTML, headers=headers)

    async def asset(self, call: Call) -> None:
        """`/docs/NAME`. Raises RequestError 404."""
        name = call.scope["path_params"]["name"]
        if name not in ASSETS:
            raise RequestError(404, f"there is no {abbreviated(name)}")
        await PAGE.respond(call, name, ASSETS[name])
