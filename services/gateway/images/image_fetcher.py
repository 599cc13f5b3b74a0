"""Fetches images and videos by HTTP: from allowed hosts at public addresses, within a time and a size.

A host's name is looked up once, each of its addresses is judged, and the connection is made to one of these, so that a
name that means something else a moment later leads nowhere else. Redirects are followed by the same rules.
"""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urljoin

from services.gateway.api.embeds.images import check_url
from services.gateway.api.errors import RequestError, invalid
from services.gateway.api.media.source import IMAGE, MediaKind
from services.gateway.metrics import IMAGE_FETCHES

if TYPE_CHECKING:
    import aiohttp

MAX_REDIRECTS = 3
MAX_FETCHES = 16
"""At the same time, by one gateway; further ones wait within their time."""
CHUNK_BYTES = 64 * 2**10
REDIRECTS = (301, 302, 303, 307, 308)
NAT64 = IPv6Network("64:ff9b::/96")
"""Addresses that lead to whatever IPv4 address they hold."""

IpAddress = IPv4Address | IPv6Address


def is_public(address: IpAddress) -> bool:
    """Whether it is of the internet, and holds no other address that might not be."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address.sixtofour is not None or address.teredo is not None or address in NAT64:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


class ImageFetcher:
    """Fetches one file after the other; several at a time, as many as `MAX_FETCHES`."""

    def __init__(self, hosts: tuple[str, ...], timeout: float, allows: Callable[[IpAddress], bool] = is_public) -> None:
        """`hosts`: see `check_url`. `timeout`: seconds that a file may take, redirects included. `allows`: which
        addresses hosts may have."""
        self._hosts, self._timeout, self._allows = hosts, timeout, allows
        self._slots = asyncio.Semaphore(MAX_FETCHES)

    @staticmethod
    def check_installed() -> None:
        """Raises ImportError where the client's library is missing."""
        import aiohttp  # noqa: F401 - gateways that fetch nothing do without it

    async def fetch(self, url: str, name: str, kind: MediaKind = IMAGE) -> bytes:
        """The file at an address, which the client gave in the field `name`. Raises RequestError 400."""
        import aiohttp

        try:
            async with asyncio.timeout(self._timeout), self._slots:
                found = await self._follow(url, name, kind)
        except TimeoutError:
            IMAGE_FETCHES.labels("too slow").inc()
            raise invalid(name, f"fetching the {kind.noun} takes more than {self._timeout:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            IMAGE_FETCHES.labels("failed").inc()
            raise invalid(name, f"the {kind.noun} could not be fetched ({type(error).__name__})") from None
        except RequestError:
            IMAGE_FETCHES.labels("refused").inc()
            raise
        IMAGE_FETCHES.labels("fetched").inc()
        return found

    async def _follow(self, url: str, name: str, kind: MediaKind) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            parts = check_url(url, name, self._hosts, kind)
            found = await self._get(parts, await self._addresses(parts, name, kind), name, kind)
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        raise invalid(name, f"more than {MAX_REDIRECTS} redirects")

    async def _addresses(self, parts: SplitResult, name: str, kind: MediaKind) -> list[str]:
        """Of the host, all of which are allowed."""
        found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
        addresses = [str(each[4][0]) for each in found]
        if not addresses or not all(self._allows(ip_address(each.partition("%")[0])) for each in addresses):
            raise invalid(
                name, f"{kind.noun}s may not be fetched from {parts.hostname}: an address of it is not public"
            )
        return addresses

    async def _get(self, parts: SplitResult, addresses: list[str], name: str, kind: MediaKind) -> bytes | str:
        """The file, or where it is said to be."""
        import aiohttp

        connector = aiohttp.TCPConnector(resolver=_pinned(addresses), use_dns_cache=False, force_close=True)
        async with (
            aiohttp.ClientSession(connector=connector, auto_decompress=False, trust_env=False) as session,
            session.get(
                parts.geturl(),
                allow_redirects=False,
                headers={"Accept": f"{kind.shown}/*", "Accept-Encoding": "identity"},
            ) as answer,
        ):
            if answer.status in REDIRECTS and (where := answer.headers.get("Location")):
                return where
            if answer.status != 200:
                raise invalid(name, f"the {kind.noun} could not be fetched: its host answers with {answer.status}")
            return await _body(answer, name, kind)


async def _body(answer: aiohttp.ClientResponse, name: str, kind: MediaKind) -> bytes:
    """What was answered, as far as it may be long."""
    found = io.BytesIO()  # it gives what it holds without a copy
    async for chunk in answer.content.iter_chunked(CHUNK_BYTES):
        found.write(chunk)
        if found.tell() > kind.max_bytes:
            raise invalid(name, f"{kind.a_noun} of more than {kind.max_bytes} bytes is not allowed")
    return found.getvalue()


def _pinned(addresses: list[str]) -> Any:
    """A resolver that knows these addresses and nothing else."""
    from aiohttp.abc import AbstractResolver

    class PinnedResolver(AbstractResolver):
        """Answers any name with the addresses that were judged."""

        async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[Any]:
            """See aiohttp."""
            return [
                {
                    "hostname": host,
                    "host": each,
                    "port": port,
                    "family": socket.AF_INET6 if ":" in each else socket.AF_INET,
                    "proto": 0,
                    "flags": socket.AI_NUMERICHOST,
                }
                for each in addresses
            ]

        async def close(self) -> None:
            """Nothing is open."""

    return PinnedResolver()
