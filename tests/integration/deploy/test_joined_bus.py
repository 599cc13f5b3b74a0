"""The bus servers of hosts that joined, with what `baton join` was given: they meet by mutual TLS, and nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.model_choice import DEMO_MODEL
from deploy.supervisor.cluster.folder import ClusterFolder
from deploy.supervisor.cluster.join_client import JoiningHost, find_stack, join_stack
from deploy.supervisor.cluster.messages import HostMembership
from deploy.supervisor.cluster.model_fingerprint import model_fingerprint
from deploy.supervisor.servers.nats_config import RouteSettings, nats_config, passwords_of
from deploy.supervisor.spec import TlsFiles
from shared import topics
from shared.bus.nats_connection import NatsOptions, connect
from shared.ids import Attempt, NodeId, RequestId
from shared.messages.coordinator import Withdraw
from shared.permissions import User
from tests.support.cluster.join_door import HERE, door, first_host, until_open
from tests.support.cluster.nats_server import NatsServer, run_config
from tests.support.cluster.ports import free_port
from tests.support.cluster.tls_authority import Authority

WITHDRAWN = Withdraw(RequestId("r"), Attempt(1))


@contextlib.contextmanager
def host(folder: ClusterFolder, node: str, route_port: int, routes: tuple[str, ...]) -> Iterator[NatsServer]:
    """The server of a host, as `baton up` and `baton join` configure it."""
    port, (user, password) = free_port(), folder.route_credentials
    settings = RouteSettings(node, "baton", HERE, route_port, folder.tls, user, password, routes)
    text = nats_config(HERE, port, "baton", passwords_of(folder.secret), routes=settings)
    folder.path.mkdir(parents=True, exist_ok=True)
    with run_config(folder.path, text, port) as server:
        yield server


def options(server: NatsServer, folder: ClusterFolder, user: User) -> NatsOptions:
    return NatsOptions(servers=(server.url,), user=user, password=passwords_of(folder.secret)[user])


def shaken(route_port: int, tls: TlsFiles) -> bytes:
    """What a server says to a route that shows a certificate, all of it encrypted. Raises SSLError where it does not
    take it."""
    with socket.create_connection((HERE, route_port), timeout=60) as raw:
        context = ssl.create_default_context(cafile=tls.authority)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.load_cert_chain(tls.certificate, tls.key)
        with context.wrap_socket(raw) as encrypted:
            return encrypted.recv(4)


async def test_what_is_published_on_one_host_is_heard_on_the_one_that_joined(tmp_path: Path) -> None:
    join_port, routes_of_a, routes_of_b = free_port(), free_port(), free_port()
    spec = first_host(tmp_path / "a", join_port, routes_of_a)
    async with door(spec, {}) as first:
        token = first.new_token(HERE, join_port, time.time())
        await until_open(token)
        asking = JoiningHost("b", HERE, routes_of_b, model_fingerprint(DEMO_MODEL, weights=True), gateways=False)
        joined = await join_stack(token, await find_stack(token), asking)
    second = ClusterFolder(tmp_path / "b")
    member = HostMembership(node=NodeId("b"), address=HERE, route_port=routes_of_b, stack=joined.membership)
    second.keep_membership(member, joined.authority, joined.key)
    with (
        host(first, "a", routes_of_a, ()) as here,
        host(second, "b", routes_of_b, second.membership().stack.routes) as there,
    ):
        heard = asyncio.Event()

        async def hear(message: Withdraw) -> None:
            assert message == WITHDRAWN
            heard.set()

        listener = await connect(options(there, second, "coordinator"))
        speaker = await connect(options(here, first, "gateway"))
        await listener.subscribe(topics.withdrawals(), hear)
        async with asyncio.timeout(60):
            while not heard.is_set():  # until the servers have met
                await speaker.publish(topics.withdrawals(), WITHDRAWN)
                await asyncio.sleep(0.01)
        await speaker.close()
        await listener.close()
        certificate, key, authority = Authority(tmp_path / "another").files("c")
        for port in (routes_of_a, routes_of_b):
            assert await asyncio.to_thread(shaken, port, second.tls) == b"INFO"
            with pytest.raises(ssl.SSLError, match="ALERT"):
                await asyncio.to_thread(shaken, port, TlsFiles(authority=authority, certificate=certificate, key=key))
