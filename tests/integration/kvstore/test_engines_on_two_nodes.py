"""A prompt that an engine of one node computed is loaded by an engine of another, from store to store."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from deploy.model_choice import DEMO_MODEL
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from shared.messages.lifecycle import Lifecycle
from tests.support.cluster.conversations import DEADLINE, client_of
from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.kv.arenas import new_directory, remove
from tests.support.kv.prompts import ask, prompts, stored
from tests.support.paths import REPOSITORY

LENGTH = 600


class FarNode:
    """Owns a store, a scheduler and a worker on a node of their own, on the bus of a stack."""

    def __init__(self, stack: RunningStack, folder: Path) -> None:
        self.directory = new_directory()
        self._stack = stack
        self._log = folder / "far.log"
        node = ("--node", "far")
        self._processes = [
            self._start("kvstore", "kvstore", *node, f"--directory={self.directory}", "--transfer-port=0"),
            self._start("services.scheduler", "engine", *node),
            self._start(
                "services.worker",
                *("engine-rank0", "--engine=far-engine", f"--model={DEMO_MODEL}", f"--kvstore-dir={self.directory}"),
                *(f"--served-model-name={stack.model}", "--device=cpu", "--dtype=float32", "--threads=1"),
            ),
        ]

    def _start(self, module: str, name: str, *flags: str) -> subprocess.Popen[bytes]:
        user, password = self._stack.user_credentials(module.rpartition(".")[2])
        who = (f"--instance=far-{name}", f"--nats-url={self._stack.state.nats_url[0]}")
        secret = (f"--nats-user={user}", f"--nats-password={password}", "--metrics-port=none")
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, *who, *secret, *flags], cwd=REPOSITORY, stdout=log, stderr=log
            )

    def close(self) -> None:
        print(self._log.read_text(), file=sys.stderr)  # for whoever reads why a test failed
        for process in self._processes:
            process.kill()
            process.wait()
        remove(self.directory)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    settings = ["kvstore.transfer_port=0", "scheduler.remote_deadline=10"]
    with running_stack(
        tmp_path_factory.mktemp("near"), engines=1, kvstore="64MiB", settings=settings, more=["--node=near"]
    ) as stack:
        yield stack


@contextlib.asynccontextmanager
async def far_node(stack: RunningStack, folder: Path) -> AsyncIterator[None]:
    node = FarNode(stack, folder)
    try:
        for name in ("far-kvstore", "far-engine"):
            async with asyncio.timeout(DEADLINE):
                while (await said(stack, name)).phase != "ready":
                    pass
        yield
    finally:
        node.close()


async def said(stack: RunningStack, instance: str) -> Lifecycle:
    """What it last said of itself, once it says something."""
    async with asyncio.timeout(DEADLINE):
        while (life := (await stack.ps()).get(instance)) is None:
            pass
    return life


@pytest.mark.slow
async def test_what_one_node_computed_another_loads(stack: RunningStack, tmp_path: Path) -> None:
    [prompt] = prompts(stack, (LENGTH,))
    async with client_of(stack.url) as client:
        computed = await ask(client, stack.model, prompt)
    assert computed.cached == 0
    await stored(stack, LENGTH // BLOCK_SIZE)
    async with far_node(stack, tmp_path), client_of(stack.url) as client:
        async with stack.bus() as bus:
            await bus.request_raw("admin.drain", b'{"instance": "engine-1"}', DEADLINE)
        loaded = await ask(client, stack.model, prompt)
        assert loaded.text == computed.text
        assert loaded.cached >= LENGTH // BLOCK_SIZE * BLOCK_SIZE
        store = (await said(stack, "far-kvstore")).store
        assert store is not None
        assert store.lower_hits >= LENGTH // BLOCK_SIZE
        async with asyncio.timeout(DEADLINE):
            while any(
                life.store is not None and (life.store.pinned or life.store.reserved)
                for life in (await stack.ps()).values()
            ):
                pass
