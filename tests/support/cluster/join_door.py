"""The first host's door, where others ask to join, as a real server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

from deploy.model_choice import DEMO_MODEL
from deploy.supervisor.cluster.folder import ClusterFolder
from deploy.supervisor.cluster.join_client import JoinFailed, find_stack
from deploy.supervisor.cluster.join_server import JoinServer
from deploy.supervisor.cluster.tokens import JoinToken
from deploy.supervisor.spec import ClusterSpec, StackSpec
from shared.ids import ModelName, NodeId

HERE = "127.0.0.1"


def first_host(run_dir: Path, join_port: int, route_port: int) -> StackSpec:
    return StackSpec(
        name="first",
        run_dir=run_dir,
        model=DEMO_MODEL.resolve(),
        served_model_name=ModelName("demo"),
        host=HERE,
        port=0,
        settings={"worker": {"dtype": "float32", "threads": "1"}},
        api_keys=("sk-1",),
        cluster=ClusterSpec(node=NodeId("a"), address=HERE, join_port=join_port, route_port=route_port),
        namespace="baton",
        log_level="info",
        drain_timeout=5.0,
        start_timeout=60.0,
    )


class Alive(NamedTuple):
    hosts: dict[NodeId, str]

    def addresses(self) -> dict[NodeId, str]:
        return self.hosts

    def model_servers(self) -> tuple[str, ...]:
        return tuple(f"{address}:6223" for address in self.hosts.values())


@contextlib.asynccontextmanager
async def door(spec: StackSpec, alive: dict[NodeId, str]) -> AsyncIterator[ClusterFolder]:
    assert spec.cluster is not None
    folder = ClusterFolder(spec.run_dir)
    folder.prepare_first(spec.cluster.node, HERE)
    routes = socket.create_server((HERE, spec.cluster.route_port))
    running = asyncio.create_task(JoinServer(spec, spec.cluster, Alive(alive)).run())
    try:
        yield folder
    finally:
        running.cancel()
        await asyncio.wait({running})
        routes.close()


async def until_open(token: JoinToken) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(JoinFailed):
                await find_stack(token)
                return
            await asyncio.sleep(0.05)
