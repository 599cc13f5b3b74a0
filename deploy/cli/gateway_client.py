"""Speaks HTTP to a gateway: is it ready, and a chat as it comes. Standard library only."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import ssl
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from deploy.errors import CommandError
from shared.tls.client_context import CERTIFICATE, KEY, ClientCertificateError, client_context

POLL_INTERVAL = 0.05
ANSWER_TIMEOUT = 300.0
"""Seconds between two pieces of an answer; the gateway sends keep-alive comments much more often."""


async def wait_until_ready(url: str, seconds: float, *, wants_certificates: bool = False) -> bool:
    """Whether GET /ready says 200 within that time. A gateway that `wants_certificates` of its clients is asked with
    the one that the environment names; where it takes none, it is ready once it speaks TLS. Raises CommandError for a
    certificate that cannot be read."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not await _is_ready(url, wants_certificates):
                await asyncio.sleep(POLL_INTERVAL)
            return True
    return False


async def _is_ready(url: str, wants_certificates: bool) -> bool:
    where, refused = urlsplit(url), False
    tls = _unchecked(wants_certificates) if where.scheme == "https" else None
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(where.hostname, where.port, ssl=tls)
        # Until it answers: who shows none has shaken hands already when the connection ends (RFC 8446, 4.4.2.4).
        refused = tls is not None and wants_certificates
        try:
            writer.write(f"GET /ready HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\n\r\n".encode())
            if answer := await reader.readline():
                return b" 200 " in answer
        finally:
            writer.close()
    return refused


def _unchecked(wants_certificates: bool) -> ssl.SSLContext:
    """For a gateway of this machine that is asked for nothing but whether it is ready, by an address that its
    certificate need not name."""
    context = checked_tls() if wants_certificates else ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def stream_chat(url: str, key: str | None, body: dict[str, Any]) -> Iterator[str]:
    """The answer's text, piece by piece. Raises CommandError with the server's own words."""
    with contextlib.closing(_connection(url)) as connection:
        response = _post(connection, "/v1/chat/completions", key, {**body, "stream": True})
        for event in _events(response):
            if "error" in event:
                raise CommandError(str(event["error"].get("message", event["error"])))
            for choice in event.get("choices", ()):
                if text := choice.get("delta", {}).get("content"):
                    yield str(text)


def served_models(url: str, key: str | None) -> Sequence[str]:
    """Names under GET /v1/models. Raises CommandError."""
    return [str(model["id"]) for model in listed_models(url, key)]


def listed_models(url: str, key: str | None) -> Sequence[dict[str, Any]]:
    """The models under GET /v1/models, adapters too. Raises CommandError."""
    with contextlib.closing(_connection(url)) as connection:
        found: Sequence[dict[str, Any]] = json.loads(_answer(connection, "GET", "/v1/models", key, None).read())["data"]
        return found


def post(url: str, key: str | None, path: str, body: dict[str, Any]) -> str:
    """The text of the answer. Raises CommandError with the server's own words."""
    with contextlib.closing(_connection(url)) as connection:
        return _post(connection, path, key, body).read().decode(errors="replace")


def _connection(url: str) -> http.client.HTTPConnection:
    where = urlsplit(url)
    if where.scheme not in ("http", "https") or not where.hostname:
        raise CommandError(f"--url {url}: http://HOST:PORT is expected", status=2)
    if where.scheme == "http":
        return http.client.HTTPConnection(where.hostname, where.port, timeout=ANSWER_TIMEOUT)
    return http.client.HTTPSConnection(where.hostname, where.port, timeout=ANSWER_TIMEOUT, context=checked_tls())


def checked_tls() -> ssl.SSLContext:
    """See `client_context`. Raises CommandError."""
    try:
        return client_context()
    except ClientCertificateError as error:
        raise CommandError(str(error), status=2) from None


def _post(
    connection: http.client.HTTPConnection, path: str, key: str | None, body: dict[str, Any]
) -> http.client.HTTPResponse:
    return _answer(connection, "POST", path, key, json.dumps(body).encode())


def _answer(
    connection: http.client.HTTPConnection, method: str, path: str, key: str | None, body: bytes | None
) -> http.client.HTTPResponse:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
    except ssl.SSLCertVerificationError as error:
        raise CommandError(
            f"{connection.host}: its certificate is not trusted: {error.verify_message}; SSL_CERT_FILE names a file of "
            "authorities to trust"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        where = f"{connection.host}:{connection.port}"
        if isinstance(connection, http.client.HTTPSConnection) and isinstance(error, ssl.SSLError | ConnectionError):
            said = f"{where} ends the connection ({error}); where it wants a certificate of its clients"
            raise CommandError(f"{said}, {CERTIFICATE} (and {KEY}) name one") from None
        raise CommandError(
            f"{where} does not answer: {error}; is a stack running there? (baton up, baton ps)"
        ) from None
    if response.status != 200:
        raise CommandError(_refusal(response))
    return response


def _refusal(response: http.client.HTTPResponse) -> str:
    text = response.read(65_536).decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = json.loads(text)["error"]["message"]
    key = "; the key: --api-key, or BATON_API_KEY" if response.status == 401 else ""
    return f"the gateway answered {response.status}: {text}{key}"


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Server-sent events up to [DONE]; comments are skipped."""
    try:
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)
    except (OSError, http.client.HTTPException) as error:
        raise CommandError(f"the stream broke off: {error}") from None
    raise CommandError("the stream ended without [DONE]")
