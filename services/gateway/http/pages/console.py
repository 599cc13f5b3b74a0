"""`/console`: a page that shows the stack as it is, and the stream of changes that it follows. The page itself says
nothing of the stack: everybody may load it, and what it asks for then needs an operator."""

from __future__ import annotations

from services.gateway.api.errors import RequestError, abbreviated
from services.gateway.console.engine_feed import MAX_VIEWERS_OF_ENGINES
from services.gateway.console.feed import MAX_VIEWERS, ConsoleFeed
from services.gateway.console.viewer import ConsoleViewer
from services.gateway.http.call import Call
from services.gateway.http.generation import EVENT_STREAM, STREAM_HEADERS
from services.gateway.http.pages.static_files import HTML, StaticFiles
from shared.traces.request_trace import GatewaysSilent

SCRIPT, STYLE = b"text/javascript; charset=utf-8", b"text/css; charset=utf-8"
ASSETS = {
    "console.css": STYLE,
    "icon.svg": b"image/svg+xml",
    "preact.js": SCRIPT,
    "main.js": SCRIPT,
    "stream.js": SCRIPT,
    "format.js": SCRIPT,
    "parts.js": SCRIPT,
    "topology.js": SCRIPT,
    "engines.js": SCRIPT,
    "engine_inside.js": SCRIPT,
    "polling.js": SCRIPT,
    "prefixes.js": SCRIPT,
    "requests.js": SCRIPT,
    "waterfall.js": SCRIPT,
    "latency.js": SCRIPT,
    "histogram.js": SCRIPT,
    "act.js": SCRIPT,
    "playground.js": SCRIPT,
    "chat.js": SCRIPT,
    "microphone.js": SCRIPT,
    "tokens.js": SCRIPT,
}
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page loads and asks for nothing but this server's, and shows pictures that its user chose; it has no inline
scripts or styles, and is in no frame."""
REVALIDATED = b"no-cache"
"""A page of one release must not run with modules of another."""
PAGE = StaticFiles("services.gateway.http.console_page")


class Console:
    """Serves the page, what it loads, and its stream."""

    def __init__(self, feed: ConsoleFeed) -> None:
        self._feed = feed

    async def page(self, call: Call) -> None:
        """`/console`."""
        headers = [
            (b"content-security-policy", POLICY),
            (b"cache-control", REVALIDATED),
            (b"referrer-policy", b"no-referrer"),
            (b"x-content-type-options", b"nosniff"),
        ]
        await call.respond(PAGE.file("index.html").content, content_type=HTML, headers=headers)

    async def asset(self, call: Call) -> None:
        """`/console/NAME`. Raises RequestError 404."""
        name = call.scope["path_params"]["name"]
        if name not in ASSETS:
            raise RequestError(404, f"there is no {abbreviated(name)}")
        await PAGE.respond(call, name, ASSETS[name], REVALIDATED)

    async def events(self, call: Call) -> None:
        """`/console/events`: server-sent events, `snapshot` with the whole document and then `patch` with a JSON merge
        patch (RFC 7386) of it each second. Raises RequestError 503 where too many look already."""
        if self._feed.full:
            raise RequestError(503, f"{MAX_VIEWERS} pages follow this gateway already", retry_after=5.0)
        await call.start(200, EVENT_STREAM, STREAM_HEADERS)
        viewer = self._feed.add(call.connection)
        call.connection.on_lost = lambda: viewer.end(told=False)
        try:
            if call.connection.is_closing():
                return
            if await viewer.ended:
                await call.end()
        finally:
            call.connection.on_lost = None
            self._feed.remove(viewer)

    async def engine(self, call: Call) -> None:
        """`/console/engines/NAME`: server-sent events, `engine` each second: what it holds, and its last steps. It is
        asked only as long as somebody reads this. Raises RequestError 404; 503 where too many look already."""
        engine = call.scope["path_params"]["engine"]
        if not self._feed.has_engine(engine):
            raise RequestError(404, f"there is no engine {abbreviated(engine)}")
        if self._feed.engines.full:
            raise RequestError(503, f"{MAX_VIEWERS_OF_ENGINES} pages look into engines already", retry_after=5.0)
        await call.start(200, EVENT_STREAM, STREAM_HEADERS)
        viewer = ConsoleViewer(call.connection)
        call.connection.on_lost = lambda: viewer.end(told=False)
        try:
            if call.connection.is_closing():
                return
            await self._feed.engines.follow(engine, viewer)
            if viewer.ended.result():
                await call.end()
        finally:
            call.connection.on_lost = None

    async def request(self, call: Call) -> None:
        """`/console/requests/ID`: what each service has done for a request, and is doing, as far as it is remembered,
        and who did not answer. Raises RequestError 404, and 503 where that is not known, as a gateway is silent."""
        name = call.scope["path_params"]["request"]
        try:
            trace = await self._feed.request(name)
        except GatewaysSilent as silent:
            raise RequestError(503, f"request {abbreviated(name)}: {silent}", retry_after=1.0) from None
        if trace is None:
            raise RequestError(404, f"no process remembers a request {abbreviated(name)} (--trace-history)")
        hops = [hop._asdict() for hop in trace.hops]
        await call.respond_json({"trace": trace.trace_id, "hops": hops, "unanswered": trace.unanswered})
