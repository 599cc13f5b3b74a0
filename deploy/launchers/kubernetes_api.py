"""As much of Kubernetes' HTTP API as scaling needs: read, replace, watch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp

ANSWER_TIMEOUT = 10.0
WATCH_SECONDS = 300
"""After which the API server ends a watch, as it would by itself after a time of its choice."""
WATCH_SILENCE = 330.0
"""Seconds without anything after which a watch is taken to be lost."""
MAX_EVENT = 2**22
"""Bytes of one event; an object of Kubernetes has 1.5 MiB at most."""


class ApiRefusal(Exception):
    """The API server answered with an error; the text is its own."""

    def __init__(self, status: int, text: str, retry_after: float = 0.0) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status
        self.retry_after = retry_after
        """Seconds for which it wants to be left alone."""


class ApiAway(Exception):
    """The API server cannot be reached, or went away in the middle."""


class KubernetesApi:
    """The objects of one namespace, behind `kubectl proxy`, which adds the user's credentials."""

    def __init__(self, session: aiohttp.ClientSession, url: str, namespace: str) -> None:
        self._session = session
        self._root = f"{url.rstrip('/')}/apis"
        self._namespace = namespace

    def path(self, api: str, kind: str, name: str = "") -> str:
        """Where an object is, or all of a kind, e.g. of the API `apps/v1` the kind `statefulsets`."""
        return f"{api}/namespaces/{self._namespace}/{kind}" + (f"/{name}" if name else "")

    async def read(self, path: str) -> dict[str, Any]:
        """An object at a path of `path`, or below it. Raises ApiRefusal, ApiAway."""
        return await self._call("GET", path, None)

    async def replace(self, path: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Writes an object that was read before: refused with 409 where somebody has written it since. Raises
        ApiRefusal, ApiAway."""
        return await self._call("PUT", path, content)

    async def watch(self, path: str, name: str, version: str) -> AsyncIterator[dict[str, Any]]:
        """The states after `version` of one of the objects at `path`, for WATCH_SECONDS at most. Raises ApiRefusal (410
        where the server does not remember the version), ApiAway."""
        query = {
            "watch": "true",
            "fieldSelector": f"metadata.name={name}",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_TIMEOUT, sock_read=WATCH_SILENCE)
        with _away():
            async with self._session.get(f"{self._root}/{path}", params=query, timeout=timeout) as response:
                await _refuse(response)
                async for line in response.content:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise ApiRefusal(int(event["object"].get("code", 500)), str(event["object"].get("message", "")))
                    yield event["object"]

    async def _call(self, method: str, path: str, content: Mapping[str, Any] | None) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT)
        with _away():
            async with self._session.request(method, f"{self._root}/{path}", json=content, timeout=timeout) as response:
                await _refuse(response)
                return dict(await response.json())


@contextlib.asynccontextmanager
async def kubernetes_api(url: str, namespace: str) -> AsyncIterator[KubernetesApi]:
    """The API at `url`, e.g. http://127.0.0.1:8001. Raises ValueError where that is no URL."""
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ValueError(f"{url}: http://HOST:PORT is expected, as `kubectl proxy` prints it")
    async with aiohttp.ClientSession(read_bufsize=MAX_EVENT) as session:
        yield KubernetesApi(session, url, namespace)


@contextlib.contextmanager
def _away() -> Iterator[None]:
    """What the client library raises, in our words."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise ApiAway(str(error) or type(error).__name__) from None


async def _refuse(response: aiohttp.ClientResponse) -> None:
    """Raises ApiRefusal for an error, with the message of Kubernetes' Status object where there is one."""
    if response.status < 400:
        return
    text = await response.text()
    with contextlib.suppress(ValueError, AttributeError):
        text = json.loads(text).get("message", text)
    try:
        wait = float(response.headers.get("Retry-After", "0"))
    except ValueError:  # a date; API servers send seconds
        wait = 0.0
    raise ApiRefusal(response.status, text[:500], wait)
