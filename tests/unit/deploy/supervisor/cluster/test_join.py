"""A host and the first host's door, over real TLS on loopback: who is let in gets everything, others a clear reason."""

from __future__ import annotations

import asyncio
import stat
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from deploy.model_choice import DEMO_MODEL
from deploy.supervisor.cluster.certificates import fingerprint, is_for
from deploy.supervisor.cluster.folder import ClusterFolder
from deploy.supervisor.cluster.join_client import JoinFailed, JoiningHost, find_stack, join_stack
from deploy.supervisor.cluster.join_server import MAX_CONNECTIONS
from deploy.supervisor.cluster.model_fingerprint import model_fingerprint
from shared.ids import NodeId
from tests.support.cluster.join_door import HERE, door, first_host, until_open
from tests.support.cluster.ports import free_port


async def test_a_host_with_a_token_is_let_in_and_others_are_told_why_not(tmp_path: Path) -> None:
    join_port, route_port, own_port = free_port(), free_port(), free_port()
    alive: dict[NodeId, str] = {}
    spec = first_host(tmp_path / "a", join_port, route_port)
    model = model_fingerprint(DEMO_MODEL, weights=True)
    host = JoiningHost("b", HERE, own_port, model, gateways=False)
    async with door(spec, alive) as folder:
        token = folder.new_token(HERE, join_port, time.time())
        await until_open(token)
        found = await find_stack(token)
        assert (found.facts.served_model_name, found.facts.model, found.facts.node) == (
            "demo",
            str(DEMO_MODEL.resolve()),
            "a",
        )
        assert abs(found.clock_offset) <= found.clock_uncertainty + 1e-3, "one clock"

        joined = await join_stack(token, found, host)
        assert joined.membership.routes == (f"{HERE}:{route_port}",)
        assert joined.membership.settings == {"worker": {"dtype": "float32"}, "*": {"block_size": "16"}}
        assert joined.membership.api_keys == ()
        assert joined.membership.secret == folder.secret
        assert fingerprint(joined.authority) == token.authority
        assert is_for(joined.membership.certificate.encode(), HERE)
        without_model = await join_stack(token, found, host._replace(model=None))
        assert without_model.membership.fingerprint == model
        with_gateways = await join_stack(token, found, host._replace(gateways=True))
        assert with_gateways.membership.api_keys == ("sk-1",)

        alive[NodeId("b")] = HERE
        with pytest.raises(JoinFailed, match="--node b: a host of this name is a member, and there"):
            await join_stack(token, found, host)
        other = replace(model, weights="0")
        with pytest.raises(JoinFailed, match="--model weights 0"):
            await join_stack(token, found, host._replace(node="c", model=other))
        with pytest.raises(JoinFailed, match=r"--advertise-address 10\.255\.255\.1 \(--route-port"):
            await join_stack(token, found, host._replace(node="c", address="10.255.255.1"))

        folder.tokens.revoke(token.id)
        with pytest.raises(JoinFailed, match=f"token {token.id}: it is unknown here, or was revoked"):
            await find_stack(token)
        old = folder.new_token(HERE, join_port, time.time() - 100, lifetime=50)
        with pytest.raises(JoinFailed, match=f"token {old.id}: it has expired; `baton token` on a makes another"):
            await find_stack(old)
        with pytest.raises(JoinFailed, match="its authority has another fingerprint"):
            await find_stack(replace(token, authority=bytes(32)))
        with pytest.raises(JoinFailed, match="the first host cannot be reached at"):
            await find_stack(replace(token, port=own_port))


async def test_what_is_no_message_is_answered_and_the_door_stays_open(tmp_path: Path) -> None:
    join_port, route_port = free_port(), free_port()
    async with door(first_host(tmp_path / "a", join_port, route_port), {}) as folder:
        token = folder.new_token(HERE, join_port, time.time())
        await until_open(token)
        reader, writer = await asyncio.open_connection(HERE, join_port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(30):
            assert await reader.read() == b"", "no TLS, no answer"
        writer.close()
        await find_stack(token)


async def test_who_says_nothing_takes_a_place_and_no_more(tmp_path: Path) -> None:
    join_port, route_port = free_port(), free_port()
    async with door(first_host(tmp_path / "a", join_port, route_port), {}) as folder:
        token = folder.new_token(HERE, join_port, time.time())
        await until_open(token)
        silent = [await asyncio.open_connection(HERE, join_port) for _ in range(MAX_CONNECTIONS)]
        with pytest.raises(JoinFailed, match="the first host cannot be reached at"):
            await find_stack(token)
        for _, writer in silent:
            writer.close()
            await writer.wait_closed()
        await until_open(token)


def test_the_first_hosts_folder_is_private_and_stays_the_same(tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path)
    folder.prepare_first(NodeId("a"), HERE)
    files = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.path.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.prepare_first(NodeId("a"), HERE)
    assert files == {path.name: path.read_bytes() for path in folder.path.iterdir()}
    folder.prepare_first(NodeId("a"), "10.0.0.7")
    changed = {path.name for path in folder.path.iterdir() if path.read_bytes() != files[path.name]}
    assert changed == {"host.pem", "host.key"}, "a new address, a new certificate"
