"""From what was typed about other clusters to a `FederationSpec`, and whether those fit that are there."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import tempfile
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from deploy.cli.up.other_hosts import check_certificates, host_address
from deploy.errors import CommandError
from deploy.supervisor.cluster.model_fingerprint import model_fingerprint
from deploy.supervisor.servers.federation import FederationFolder
from deploy.supervisor.settings import StackSettings
from deploy.supervisor.spec import FederationSpec
from shared.ids import ClusterName
from shared.packing import NOT_DECODED

FEDERATION_PORT = 7222
MIN_SECRET_LENGTH = 16
LOOK_TIMEOUT = 3.0
"""Seconds that another cluster's server may take to answer at the start."""


def federation_choice(
    stack: StackSettings,
    values: Mapping[str, Any],
    model: Path,
    *,
    dummy_weights: bool,
    simulated: bool,
    is_running: bool,
) -> FederationSpec | None:
    """None: in no federation. `simulated`: its engines only say something that looks like text. `is_running`: processes
    of this stack go on without their supervisor, and have the port.
    Raises CommandError, too where a cluster that is there does not fit."""
    name = values.get("cluster")
    if stack.federation_address is None:
        for option in ("cluster", "federate", "federation_wait_s"):
            if option in values:
                flag = f"--{option.replace('_', '-')}"
                raise CommandError(
                    f"{flag}: --federation-address is needed, too, where others reach this one", status=2
                )
        return None
    spec = _spec(stack, name, _fingerprint(model, dummy_weights=dummy_weights, simulated=simulated))
    if not is_running:
        _check_listens(spec)
        asyncio.run(_check_others(spec))
    return spec


def _spec(stack: StackSettings, name: str | None, fingerprint: str) -> FederationSpec:
    assert stack.federation_address is not None
    if stack.nodes > 1:
        raise CommandError("--federation-address: not with --nodes; engines of several hosts: see baton join", status=2)
    if name is None:
        raise CommandError("--federation-address: --cluster NAME is needed, too, of this stack among others", status=2)
    try:
        cluster = msgspec.convert(name, ClusterName)
    except msgspec.ValidationError:
        raise CommandError(f"--cluster {name}: 1 to 24 of A-Z a-z 0-9 - are allowed", status=2) from None
    secret = stack.federation_secret or ""
    if len(secret) < MIN_SECRET_LENGTH:
        raise CommandError(
            f"--federation-secret: {MIN_SECRET_LENGTH} characters at least, the same for all clusters, better by "
            "BATON_FEDERATION_SECRET; baton cluster secret makes one",
            status=2,
        )
    check_certificates()
    host, port = host_address("--federation-address", stack.federation_address, FEDERATION_PORT)
    others = tuple(joined(*host_address("--federate", each, FEDERATION_PORT)) for each in stack.federate)
    if joined(host, port) in others:
        raise CommandError(f"--federate {joined(host, port)}: this is the cluster's own address", status=2)
    return FederationSpec(cluster=cluster, host=host, port=port, others=others, secret=secret, model=fingerprint)


def joined(host: str, port: int) -> str:
    """HOST:PORT, IPv6 addresses in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _fingerprint(model: Path, *, dummy_weights: bool, simulated: bool) -> str:
    """Of the model as clients hear it. A simulated one never stands in for one that is computed: a drained cluster
    serves what no other one can, and its client could not tell."""
    try:
        parts = model_fingerprint(model, weights=not dummy_weights)
    except OSError as error:
        raise CommandError(f"{error}") from None
    told = f"{parts.config} {parts.tokenizer} {parts.weights}{' simulated' if simulated else ''}"
    return blake2b(told.encode(), digest_size=16).hexdigest()


def _check_listens(spec: FederationSpec) -> None:
    family = socket.AF_INET6 if ":" in spec.host else socket.AF_INET
    try:
        socket.create_server((spec.host, spec.port), family=family).close()
    except OSError as error:
        raise CommandError(
            f"--federation-address {spec.address}: this host cannot listen there ({error.strerror or error})"
        ) from None


class _ServerInfo(Struct):
    """What a nats-server says first, as far as it matters here."""

    gateway: str = ""


class _Unreachable(Exception):
    """Nobody answers there; the cluster may come later."""


async def _check_others(spec: FederationSpec) -> None:
    """Raises CommandError where somebody else answers, or a cluster with another secret. One that is not there does not
    matter: it is called for ever."""
    with tempfile.TemporaryDirectory() as folder:
        tls = FederationFolder(Path(folder)).prepare(spec)
        assert tls.certificate is not None
        context = ssl.create_default_context(cafile=tls.authority)
        context.load_cert_chain(tls.certificate, tls.key)
        context.check_hostname = False  # the name that it gives itself is compared, and said in clearer words
        for other in spec.others:
            try:
                async with asyncio.timeout(LOOK_TIMEOUT):
                    await _check_other(other, context)
            except (_Unreachable, TimeoutError) as error:
                why = str(error) or f"no answer within {LOOK_TIMEOUT:g} s"
                print(f"--federate {other}: cannot be reached now ({why}); it is tried again for ever")


async def _check_other(other: str, context: ssl.SSLContext) -> None:
    host, port = host_address("--federate", other, FEDERATION_PORT)
    try:
        reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=host)
    except ssl.SSLError:
        raise CommandError(
            f"--federate {other}: it has another secret, or is no cluster; all share one BATON_FEDERATION_SECRET"
        ) from None
    except OSError as error:
        raise _Unreachable(error.strerror or str(error)) from None
    try:
        line = await reader.readline()
        info = msgspec.json.decode(line.removeprefix(b"INFO "), type=_ServerInfo)
    except (*NOT_DECODED, OSError):
        raise CommandError(f"--federate {other}: no cluster answers there") from None
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    if info.gateway != other:
        raise CommandError(
            f"--federate {other}: the cluster there has --federation-address {info.gateway}; give that, as all name it"
        )
