"""Fixtures that every kind of test may use."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from shared.bus import Bus
from shared.bus.memory_bus import MemoryBus
from shared.bus.nats_bus import NatsOptions, connect
from tests.nats_server import NatsServer, nats_server

if not Path("/dev/nvidiactl").exists():
    # Triton's kernels run in its interpreter; it must be told before they are imported.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Ctrl-C works in tests and what they start, even where a shell in the background has it ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One real nats-server for the whole run; tests that kill theirs start their own."""
    with nats_server(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
def own_nats(tmp_path: Path) -> Iterator[NatsServer]:
    """A real nats-server of the test's own, to be killed and restarted at will."""
    with nats_server(tmp_path) as server:
        yield server


@pytest.fixture
async def memory_bus() -> AsyncIterator[MemoryBus]:
    bus = MemoryBus()
    yield bus
    await bus.close()


@pytest.fixture(params=["memory", "nats"])
async def any_bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bus]:
    """Both buses in turn: what holds for one must hold for the other. The namespace is the test's own."""
    bus: Bus
    if request.param == "memory":
        bus = MemoryBus(max_payload=2**20)
        yield bus
        await bus.close()
    else:
        with nats_server(tmp_path, max_payload=2**20) as server:
            bus = await connect(NatsOptions(servers=(server.url,)))
            yield bus
            await bus.close()
