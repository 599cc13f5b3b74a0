"""How a host asks to be let in: finds the first host, makes sure that it is the right one, and says who it is."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import msgspec

from deploy.supervisor.cluster.certificates import fingerprint, new_key, signing_request
from deploy.supervisor.cluster.messages import (
    EXCHANGE_SECONDS,
    MAX_LINE,
    AuthorityReply,
    AuthorityRequest,
    JoinAnswer,
    JoinMessage,
    JoinRefusal,
    JoinRequest,
    StackFacts,
    StackMembership,
    StackQuery,
    TokenProof,
)
from deploy.supervisor.cluster.model_fingerprint import ModelFingerprint
from deploy.supervisor.cluster.tokens import JoinToken
from shared.packing import NOT_DECODED
from shared.protocol import MIN_PROTOCOL, PROTOCOL

CONNECT_SECONDS = 10.0
REACH_SECONDS = 5.0

A = TypeVar("A", bound=JoinAnswer)


class JoinFailed(Exception):
    """The host was not let in; the text says why."""


class FoundStack(NamedTuple):
    """A stack that a token leads to."""

    authority: bytes
    """Certificate, as PEM."""
    facts: StackFacts
    clock_offset: float
    """Seconds that the first host's clock is ahead of ours."""
    clock_uncertainty: float


class JoiningHost(NamedTuple):
    """What a host says of itself."""

    node: str
    address: str
    route_port: int
    model: ModelFingerprint | None
    """None: it gets it from the others, once it is let in."""
    gateways: bool
    block_size: int | None = None
    """As it is configured here; None: as on the first host."""


class JoinedStack(NamedTuple):
    """What a host gets that was let in."""

    membership: StackMembership
    authority: bytes
    key: bytes
    """The host's own, as PEM; it never leaves the host."""


async def find_stack(token: JoinToken) -> FoundStack:
    """The stack of a token. Raises JoinFailed."""
    authority = await _authority(token)
    asked_at, asked = time.time(), time.monotonic()
    facts = await _ask(token, authority, StackQuery(_proof(token)), StackFacts)
    way = time.monotonic() - asked
    return FoundStack(authority, facts, facts.now - (asked_at + way / 2), way / 2)


async def join_stack(token: JoinToken, found: FoundStack, host: JoiningHost) -> JoinedStack:
    """Has the host let in. Raises JoinFailed."""
    key = new_key()
    request = JoinRequest(
        token=_proof(token),
        node=host.node,
        address=host.address,
        route_port=host.route_port,
        protocol=PROTOCOL,
        min_protocol=MIN_PROTOCOL,
        block_size=host.block_size or found.facts.block_size,
        model=host.model,
        clock_offset=found.clock_offset,
        clock_uncertainty=found.clock_uncertainty,
        signing_request=signing_request(key, host.node).decode(),
        gateways=host.gateways,
    )
    with _listening(host.address, host.route_port):
        membership = await _ask(token, found.authority, request, StackMembership)
    for route in membership.reachable:
        await _check_reachable(route)
    return JoinedStack(membership, found.authority, key)


def _proof(token: JoinToken) -> TokenProof:
    return TokenProof(token.id, token.secret)


async def _authority(token: JoinToken) -> bytes:
    """Asked of whoever is there; that it is the right one its fingerprint says."""
    reply = await _ask(token, None, AuthorityRequest(), AuthorityReply)
    certificate = reply.certificate.encode()
    with contextlib.suppress(ValueError):
        if fingerprint(certificate) == token.authority:
            return certificate
    raise JoinFailed(
        f"token: who answers at {_place(token)} is not the stack that it was made for: its authority has another "
        "fingerprint"
    )


async def _ask(token: JoinToken, authority: bytes | None, message: JoinMessage, expected: type[A]) -> A:
    """Without `authority` nothing is checked, and nothing said that is secret."""
    try:
        async with asyncio.timeout(EXCHANGE_SECONDS):
            line = await _exchanged(token, _tls(authority), msgspec.json.encode(message) + b"\n")
    except TimeoutError:
        raise JoinFailed(_unreachable(token, f"no answer within {EXCHANGE_SECONDS:g} s")) from None
    except ssl.SSLError as error:
        why = getattr(error, "verify_message", None) or error.reason
        raise JoinFailed(f"token: {_place(token)} does not show a valid certificate of the stack ({why})") from None
    except (OSError, ValueError) as error:
        raise JoinFailed(_unreachable(token, getattr(error, "strerror", None) or str(error))) from None
    if not line:
        raise JoinFailed(_unreachable(token, "it ended the connection"))
    try:
        answer = msgspec.json.decode(line, type=JoinAnswer)
    except NOT_DECODED as error:
        raise JoinFailed(f"release: {_place(token)} answers in another form ({error}); use its release here") from None
    if isinstance(answer, JoinRefusal):
        raise JoinFailed(str(answer))
    if not isinstance(answer, expected):
        raise JoinFailed(f"release: {_place(token)} answers {type(answer).__name__}; use its release here")
    return answer


async def _exchanged(token: JoinToken, tls: ssl.SSLContext, line: bytes) -> bytes:
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(
                token.address, token.port, ssl=tls, server_hostname=token.address, limit=MAX_LINE
            )
    except TimeoutError:
        raise OSError(f"no connection within {CONNECT_SECONDS:g} s") from None
    try:
        writer.write(line)
        await writer.drain()
        return await reader.readline()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _tls(authority: bytes | None) -> ssl.SSLContext:
    if authority is not None:
        return ssl.create_default_context(cadata=authority.decode())
    unchecked = ssl.create_default_context()
    unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
    return unchecked


def _place(token: JoinToken) -> str:
    return f"{token.address}:{token.port}"


def _unreachable(token: JoinToken, why: str) -> str:
    return (
        f"token: the first host cannot be reached at {_place(token)} ({why}); is it up with --advertise-address, and "
        "the port open?"
    )


@contextlib.contextmanager
def _listening(address: str, port: int) -> Iterator[None]:
    """So that the first host can see whether others will reach this one's nats-server there. Raises JoinFailed."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        server = socket.create_server((address, port), family=family)
    except OSError as error:
        raise JoinFailed(
            f"--advertise-address {address} (--route-port {port}): this host cannot listen there ({error.strerror})"
        ) from None
    with server:
        yield


async def _check_reachable(route: str) -> None:
    host, _, port = route.rpartition(":")
    try:
        async with asyncio.timeout(REACH_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError) as error:
        why = getattr(error, "strerror", None) or f"no answer within {REACH_SECONDS:g} s"
        raise JoinFailed(
            f"network: the NATS server of another host cannot be reached at {route} ({why}); every host must reach the "
            "--route-port of every other"
        ) from None
    writer.close()
