"""Gateways of several clusters in one process, each with a bus and a fake ring of its own, joined by a link that tests
cut."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from services.gateway.federation.federation import Federation
from shared.bus import Bus
from shared.bus.memory_bus import MemoryBus
from shared.topics import Topic
from tests.support.cluster.stall_proof_clock import StallProofClock
from tests.support.gateway.fake_services import MODEL, FakeRing, eventually
from tests.support.gateway.gateway_server import GatewayStack, gateway_stack


class Link:
    """One gateway's connection to the other clusters: nothing passes while it is `cut`."""

    def __init__(self, bus: MemoryBus) -> None:
        self._bus = bus
        self.cut = False
        self.lose_next: list[type] = []
        """Types of messages of which the next one that is sent is lost."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def publish(self, topic: Topic[Any], message: Any, *, confirm: bool = False) -> None:
        if type(message) in self.lose_next:
            self.lose_next.remove(type(message))
        elif not self.cut:
            await self._bus.publish(topic, message, confirm=confirm)

    async def subscribe(
        self,
        topic: Topic[Any],
        handler: Callable[[Any], Awaitable[None]],
        *,
        offer: Callable[[Any], bool] | None = None,
    ) -> Any:
        async def hear(message: Any) -> None:
            if not self.cut:
                await handler(message)

        return await self._bus.subscribe(topic, hear)

    async def close(self) -> None:
        """The other clusters stay."""


class Cluster:
    """One cluster: its gateway, its fake ring, and its link."""

    def __init__(self, name: str, stack: GatewayStack, link: Link) -> None:
        self.name, self.stack, self.ring, self.link = name, stack, stack.ring, link

    @property
    def federation(self) -> Federation:
        assert self.stack.gateway.federation is not None
        return self.stack.gateway.federation

    def states(self) -> dict[str, str]:
        """The state of each cluster that it knows."""
        return {f"{entry.name}": entry.state for entry in self.federation.listing()}


@asynccontextmanager
async def federated(
    *names: str, step: float = 0.0, folder: Path | None = None, **settings: Any
) -> AsyncIterator[list[Cluster]]:
    """Clusters of these names, which know each other and have room where they are not drained. `settings`: of all their
    gateways. `folder`: where each remembers whether it is drained."""
    wire = MemoryBus()
    async with AsyncExitStack() as stacks:
        found = []
        for port, name in enumerate(names, 7300):
            bus = MemoryBus()
            stacks.push_async_callback(bus.close)
            bus.liveness_now = StallProofClock()  # type: ignore[method-assign]
            link = Link(wire.connection())

            async def connect(_: object, link: Link = link) -> Bus:
                return link

            own: dict[str, Any] = {
                "cluster": name,
                "federation_address": f"127.0.0.1:{port}",
                "federation_url": "nats://u:p@127.0.0.1",
            }
            if folder is not None:
                own["federation_state"] = folder / f"{name}.json"
            stack = await stacks.enter_async_context(
                gateway_stack(bus, ring=FakeRing(bus, step), connect=connect, **(own | settings))
            )
            found.append(Cluster(name, stack, link))
        for cluster in found:
            await eventually(lambda c=cluster: c.federation.clusters.serves(MODEL))  # type: ignore[misc]
            await cluster.federation.say_status()
        if len(set(names)) == len(names):
            for cluster in found:
                await eventually(lambda c=cluster: sorted(c.states()) == sorted(names))  # type: ignore[misc]
                if not any(each.federation.clusters.drained for each in found):
                    await eventually(lambda c=cluster: c.federation.clusters.has_room(MODEL))  # type: ignore[misc]
        yield found
    await wire.close()
