"""Images are fetched from real servers: from allowed hosts at allowed addresses, in time, and not too much."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Any

import pytest
from aiohttp import web

from services.gateway.api.errors import RequestError
from services.gateway.images.image_fetcher import MAX_REDIRECTS, ImageFetcher, is_public
from shared.messages.encoder import MAX_IMAGE_BYTES

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[int]:
    """A port of this machine where everything is answered so."""
    app = web.Application()
    app.router.add_route("*", "/{any:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def fetcher(*hosts: str, timeout: float = 30.0) -> ImageFetcher:
    return ImageFetcher(hosts, timeout, allows=lambda address: address.is_loopback)


async def why(fetching: Awaitable[bytes]) -> str:
    with pytest.raises(RequestError) as error:
        await fetching
    assert (error.value.status, error.value.param) == (400, "url")
    return error.value.message


async def test_a_file_is_fetched_and_redirects_are_followed() -> None:
    seen: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(request.path_qs)
        assert request.headers["Accept-Encoding"] == "identity"
        if request.path == "/there":
            return web.Response(body=b"the image")
        raise web.HTTPFound("/there")

    async with server(answer) as port:
        found = await fetcher(f"localhost:{port}").fetch(f"http://localhost:{port}/here?a=b", "url")
    assert (found, seen) == (b"the image", ["/here?a=b", "/there"])


async def test_a_redirect_leads_to_allowed_hosts_only() -> None:
    async def elsewhere(request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound(request.query["to"])

    async with server(elsewhere) as port:
        base, own = f"http://localhost:{port}/", fetcher(f"localhost:{port}")
        for to in ("http://169.254.169.254/latest", f"http://127.0.0.1:{port}/", "file:///etc/passwd", "gopher://x"):
            text = await why(own.fetch(f"{base}?to={to}", "url"))
            assert "not be fetched" in text or "an http or https URL" in text


async def test_endless_redirects_end() -> None:
    count = 0

    async def again(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        raise web.HTTPFound(f"/{count}")

    async with server(again) as port:
        text = await why(fetcher(f"localhost:{port}").fetch(f"http://localhost:{port}/", "url"))
    assert text == f"url: more than {MAX_REDIRECTS} redirects"
    assert count == MAX_REDIRECTS + 1


async def test_too_much_too_slow_and_missing_are_said() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/large":
            response = web.StreamResponse()
            await response.prepare(request)
            for _ in range(MAX_IMAGE_BYTES // 2**20 + 2):
                await response.write(bytes(2**20))
            return response
        if request.path == "/slow":
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"x")
            await asyncio.sleep(30)
            return response
        raise web.HTTPNotFound

    async with server(answer) as port:
        own, base = fetcher(f"localhost:{port}"), f"http://localhost:{port}"
        assert f"more than {MAX_IMAGE_BYTES} bytes" in await why(own.fetch(f"{base}/large", "url"))
        assert "its host answers with 404" in await why(own.fetch(f"{base}/", "url"))
        impatient = fetcher(f"localhost:{port}", timeout=0.3)
        assert "takes more than 0.3 s" in await why(impatient.fetch(f"{base}/slow", "url"))
    assert "could not be fetched" in await why(own.fetch(f"{base}/", "url"))


async def test_private_addresses_are_never_connected_to() -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        raise AssertionError("asked")

    async with server(answer) as port:
        for host in ("localhost", "127.0.0.1"):
            strict = ImageFetcher((f"{host}:{port}",), 30.0)
            assert "an address of it is not public" in await why(strict.fetch(f"http://{host}:{port}/", "url"))


async def test_a_name_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it means a moment later does not count: the connection goes to the address that was judged."""
    loop, looked_up = asyncio.get_running_loop(), []

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=request.host.encode())

    async def rebound(host: str, port: int, **more: Any) -> Any:
        looked_up.append(host)
        address = "127.0.0.1" if len(looked_up) == 1 else "192.0.2.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    async with server(answer) as port:
        with monkeypatch.context() as patched:
            patched.setattr(loop, "getaddrinfo", rebound, raising=False)
            own = fetcher(f"name.example:{port}")
            assert await own.fetch(f"http://name.example:{port}/", "url") == f"name.example:{port}".encode()
    assert looked_up == ["name.example"]


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946"])
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(ip_address(address))


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "224.0.0.1",
        ),
        *("255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1"),
        *("64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:4136:e378:8000:63bf:3fff:fdd2"),
    ],
)
def test_all_others_are_not(address: str) -> None:
    assert not is_public(ip_address(address))
