"""What is typed about other clusters, and what is said where it does not fit. Real sockets, real TLS, a real
nats-server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.hosts.cluster import ClusterAction, cluster
from deploy.cli.up.federation import federation_choice
from deploy.errors import CommandError
from deploy.supervisor.servers.federation import FederationFolder, federation_config
from deploy.supervisor.settings import StackSettings
from deploy.supervisor.spec import FederationSpec
from services.gateway.federation.topics import cluster_requests, cluster_statuses, relayed_output
from shared.bus import NoResponders
from shared.bus.nats_connection import NatsOptions, connect
from shared.ids import ClusterName, GatewayId
from shared.messages.federation import ClusterStatus
from tests.support.cluster.nats_server import run_config
from tests.support.cluster.ports import free_port
from tests.support.paths import DEMO_MODEL

SECRET = "known to all clusters"


def chosen(*, cluster: str | None = "eu", simulated: bool = False, **typed: Any) -> FederationSpec | None:
    values = {} if cluster is None else {"cluster": cluster}
    known = {"federation_address": f"127.0.0.1:{free_port()}", "federation_secret": SECRET}
    return federation_choice(
        StackSettings(**(known | typed)),
        values,
        DEMO_MODEL,
        dummy_weights=False,
        simulated=simulated,
        is_running=False,
    )


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ({"federation_address": None}, "--cluster: --federation-address is needed"),
        ({"cluster": None}, "--cluster NAME is needed"),
        ({"cluster": "a_b"}, "--cluster a_b: 1 to 24 of A-Z a-z 0-9 - are allowed"),
        ({"federation_secret": "short"}, "16 characters at least"),
        ({"federation_address": "0.0.0.0:7222"}, "one address is expected that other hosts reach"),
        ({"federation_address": "127.0.0.1:1:2"}, "ADDRESS or ADDRESS:PORT is expected"),
        ({"federation_address": "192.0.2.1"}, "this host cannot listen there"),
        ({"federation_address": "127.0.0.1:7", "federate": ("127.0.0.1:7",)}, "this is the cluster's own address"),
        ({"nodes": 2}, "not with --nodes"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_option(typed: dict[str, Any], words: str) -> None:
    with pytest.raises(CommandError, match=words):
        chosen(**typed)


def test_a_stack_that_names_no_cluster_is_in_no_federation() -> None:
    assert chosen(cluster=None, federation_address=None) is None


def test_a_simulated_model_is_another_one_than_the_same_files_computed() -> None:
    computed, simulated = chosen(), chosen(simulated=True)
    assert computed is not None
    assert simulated is not None
    assert computed.model != simulated.model


def test_a_cluster_that_is_not_there_yet_is_no_reason_not_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    there = f"127.0.0.1:{free_port()}"
    spec = chosen(federate=(there,))
    assert spec is not None
    assert spec.others == (there,)
    assert f"--federate {there}: cannot be reached now" in capsys.readouterr().out


@contextmanager
def server(folder: Path, spec: FederationSpec) -> Iterator[str]:
    """Its URL for the gateways of its cluster."""
    folder.mkdir()
    port = free_port()
    text = federation_config(spec, "baton", port, FederationFolder(folder).prepare(spec), "pw")
    with run_config(folder, text, port):
        yield f"nats://127.0.0.1:{port}"


def spec_of(cluster: str, *others: str, secret: str = SECRET) -> FederationSpec:
    return FederationSpec(
        cluster=ClusterName(cluster), host="127.0.0.1", port=free_port(), others=others, secret=secret, model=""
    )


def test_another_secret_another_address_and_no_cluster_at_all_are_told_apart(tmp_path: Path) -> None:
    there = spec_of("us")
    with server(tmp_path / "us", there):
        assert chosen(federate=(there.address,)) is not None
        with pytest.raises(CommandError, match="it has another secret, or is no cluster"):
            chosen(federate=(there.address,), federation_secret="of another federation")
        with pytest.raises(CommandError, match=f"the cluster there has --federation-address {there.address}"):
            chosen(federate=(there.address.replace("127.0.0.1", "localhost"),))


async def test_what_clusters_say_crosses_and_nothing_else_over_three_servers_that_know_one(tmp_path: Path) -> None:
    first = spec_of("eu")
    others = [spec_of(name, first.address) for name in ("us", "asia")]
    with (
        server(tmp_path / "eu", first) as eu,
        server(tmp_path / "us", others[0]) as us,
        server(tmp_path / "asia", others[1]) as asia,
    ):
        buses = [await connect(NatsOptions(servers=(url,), user="gateway", password="pw")) for url in (eu, us, asia)]
        try:
            await _all_hear_all(buses)
            await _only_its_own(buses)
        finally:
            for bus in buses:
                await bus.close()


async def _all_hear_all(buses: list[Any]) -> None:
    heard: set[tuple[int, str]] = set()
    for number, bus in enumerate(buses):

        async def hear(status: ClusterStatus, number: int = number) -> None:
            heard.add((number, status.cluster))

        await bus.subscribe(cluster_statuses(), hear)
    names = ("eu", "us", "asia")
    wanted = {(number, name) for number in range(3) for name in names}
    async with asyncio.timeout(60):
        while heard != wanted:
            for name, bus in zip(names, buses, strict=True):
                await bus.publish(cluster_statuses(), _status(name))
            await asyncio.sleep(0.1)


async def _only_its_own(buses: list[Any]) -> None:
    """A cluster's gateways hear neither what is for another one nor what is on a stack's bus."""
    eu, us, _ = buses
    heard: list[str] = []

    async def tapped(subject: str, payload: bytes) -> None:
        heard.append(subject)

    for pattern in ("federation.us.>", "gateway.*.deltas", "lifecycle.*.*", ">"):
        await eu.tap(pattern, tapped)
    await us.subscribe(relayed_output(ClusterName("us"), GatewayId("gateway-1")), _ignore)
    await us.flush()
    with pytest.raises(NoResponders):
        await eu.request(cluster_requests(ClusterName("nobody")), _status("eu"), ClusterStatus, 60)
    await us.publish(cluster_statuses(), _status("us"))
    await us.flush()
    assert heard == [], "it may hear statuses only by their own subject"


async def _ignore(message: object) -> None:
    raise AssertionError(message)


def _status(name: str) -> ClusterStatus:
    return ClusterStatus(
        cluster=ClusterName(name),
        address=name,
        gateway=GatewayId("gateway-1"),
        incarnation=1,  # type: ignore[arg-type]
        since=0.0,
        sent=0.0,
        models=(),
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"action": ClusterAction.DRAIN}, "NAME is missing"),
        ({"action": ClusterAction.LIST, "cluster_name": "eu"}, "list takes no name"),
        ({"action": ClusterAction.UNDRAIN, "cluster_name": "eu", "move_after": 3.0}, "--move-after: with drain only"),
    ],
)
def test_a_command_that_cannot_be_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(CommandError, match=words):
        cluster(**arguments)


def test_every_secret_is_another_one(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        cluster(ClusterAction.SECRET)
    secrets = capsys.readouterr().out.split()
    assert len(set(secrets)) == 2
    assert all(len(secret) >= 43 for secret in secrets)
