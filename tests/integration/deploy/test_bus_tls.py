"""A bus beyond the host: its connections are encrypted, its server is who it says, and nobody takes that away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from deploy.supervisor.servers.nats_config import make_passwords, nats_config
from deploy.supervisor.spec import TlsFiles
from shared import topics
from shared.bus import BusError
from shared.bus.nats_connection import NatsOptions, connect
from shared.ids import Attempt, RequestId
from shared.messages.coordinator import Withdraw
from tests.support.cluster.nats_server import NatsServer, nats_server
from tests.support.cluster.tls_authority import Authority

PASSWORDS = make_passwords()
PATIENCE = 3.0
"""Seconds after which a connection that cannot be made is given up."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "own")


@pytest.fixture(scope="module")
def server(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    certificate, key, ca = authority.files("host-0")
    with nats_server(
        tmp_path_factory.mktemp("nats"),
        more=encryption(TlsFiles(authority=ca, certificate=certificate, key=key)),
    ) as running:
        yield running


def encryption(tls: TlsFiles) -> str:
    """What `baton up` writes into the server's configuration, but for its address."""
    written = nats_config("127.0.0.1", 0, "baton", PASSWORDS, tls=tls)
    return written[written.index("tls {") :]


def gateway(url: str, ca: str | None, patience: float = 60.0) -> NatsOptions:
    return NatsOptions(
        servers=(url,),
        user="gateway",
        password=PASSWORDS["gateway"],
        tls_ca=Path(ca) if ca else None,
        connect_timeout=patience,
    )


async def test_a_client_with_the_authority_connects(server: NatsServer, authority: Authority) -> None:
    bus = await connect(gateway(server.url, authority.files("host-0")[2]))
    assert bus.connected
    await bus.close()


async def test_a_bus_that_has_gone_is_closed_without_an_error(authority: Authority, tmp_path: Path) -> None:
    certificate, key, ca = authority.files("host-0")
    with nats_server(tmp_path, more=encryption(TlsFiles(authority=ca, certificate=certificate, key=key))) as server:
        bus = await connect(gateway(server.url, ca))
        server.kill()
        async with asyncio.timeout(60):
            while bus.connected:
                await asyncio.sleep(0.01)
        await bus.publish(topics.withdrawals(), Withdraw(RequestId("r"), Attempt(1)))
        await bus.close()


async def test_a_server_of_another_authority_is_refused(server: NatsServer, tmp_path: Path) -> None:
    another = Authority(tmp_path / "another").files("x")[2]
    attempts = (connect(gateway(server.url, ca, PATIENCE)) for ca in (another, None))
    for refused in await asyncio.gather(*attempts, return_exceptions=True):
        assert isinstance(refused, BusError)


@pytest.mark.parametrize("scheme", ["nats", "tls"])
async def test_no_password_goes_to_a_server_that_does_not_encrypt(
    scheme: str, authority: Authority, own_nats: NatsServer
) -> None:
    """Somebody in between leaves out that the server wants TLS."""
    heard: list[bytes] = []

    async def strip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.11.0","max_payload":1048576,"auth_required":true} \r\n')
        heard.append(await reader.read(4096))
        writer.close()

    between = await asyncio.start_server(strip, "127.0.0.1", 0)
    port = between.sockets[0].getsockname()[1]
    options = gateway(f"{scheme}://127.0.0.1:{port}", authority.files("host-0")[2], PATIENCE)
    plain = msgspec.structs.replace(options, servers=(f"tls://127.0.0.1:{own_nats.port}",), tls_ca=None)
    async with between:
        for refused in await asyncio.gather(connect(options), connect(plain), return_exceptions=True):
            assert isinstance(refused, BusError)
            assert "offers no TLS" in str(refused)
    assert all(PASSWORDS["gateway"].encode() not in each for each in heard)
