"""The bus of the stack under test: the flags that say where it is, a connection as an operator, and what the stack's
processes say of themselves."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.bench.errors import BenchError
from shared import topics
from shared.bus import Bus, BusError
from shared.bus.nats_connection import NatsOptions, connect
from shared.config import process_environment
from shared.ids import InstanceId
from shared.messages.lifecycle import Lifecycle, LifecycleRequest

PASSWORD_VARIABLE = "BATON_BENCH_NATS_PASSWORD"


def bus_arguments(made: argparse.ArgumentParser) -> None:
    """The flags; the `baton` command knows their values for a stack of its own."""
    made.add_argument("--nats-url", default="nats://127.0.0.1:4222", help="comma-separated; default: %(default)s")
    made.add_argument("--nats-user", help=f"an operator's, with his password in {PASSWORD_VARIABLE}")
    made.add_argument("--nats-ca", type=Path, help="CA file; switches TLS on")
    made.add_argument("--namespace", default="baton", help="of the stack; default: %(default)s")


@asynccontextmanager
async def stack_bus(options: argparse.Namespace) -> AsyncIterator[Bus]:
    """A connection by the flags of `bus_arguments`, closed with the context. Raises BenchError."""
    nats = NatsOptions(
        servers=tuple(options.nats_url.split(",")),
        namespace=options.namespace,
        name="baton-bench",
        user=options.nats_user,
        password=process_environment().get(PASSWORD_VARIABLE),
        tls_ca=options.nats_ca,
    )
    try:
        bus = await connect(nats)
    except BusError as error:
        raise BenchError(str(error)) from None
    try:
        yield bus
    finally:
        await bus.close()


class StackProcesses:
    """Owns the last lifecycle of each process of the stack that runs."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.lives: dict[InstanceId, Lifecycle] = {}
        self.news = asyncio.Event()
        """Set by each lifecycle; who waits clears it."""

    async def listen(self, seconds: float) -> None:
        """Returns after so many, in which every process has said something."""
        await self._bus.subscribe(topics.lifecycles(), self._record)
        await self.ask()
        await asyncio.sleep(seconds)

    async def ask(self) -> None:
        """Has every process say something."""
        await self._bus.publish(topics.lifecycle_requests(), LifecycleRequest())

    async def _record(self, life: Lifecycle) -> None:
        if life.phase in ("stopped", "failed"):
            self.lives.pop(life.instance, None)
        else:
            self.lives[life.instance] = life
        self.news.set()
