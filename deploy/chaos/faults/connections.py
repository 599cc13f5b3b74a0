"""Connections to the bus that are slow, silent or cut, of one process or of all; sessions with Redis that end."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, ClassVar

from deploy.chaos.faults.fault import REFUSED, FailureKind, Fault
from deploy.chaos.faults.processes import errors_without, services
from deploy.chaos.proxy import EVERYBODY, Impairment
from deploy.chaos.stack import ChaosStack, Need

REDIS = "redis-server"


class ConnectionFault(Fault):
    """A connection to the bus that is not as it should be."""

    impairment: ClassVar[Impairment]
    needs = frozenset[Need]({"proxy"})

    def targets(self, stack: ChaosStack) -> Mapping[str, Sequence[str]]:
        """The connection of every actor, and all at once."""
        return {**services(stack), EVERYBODY: [EVERYBODY]}

    @contextlib.asynccontextmanager
    async def strike(self, stack: ChaosStack, victim: str) -> AsyncIterator[None]:
        """See `Fault.strike`."""
        with stack.proxy.impaired(victim, self.impairment):
            yield

    def allowed(self, stack: ChaosStack, victim: str) -> frozenset[FailureKind]:
        """Who cannot be reached for longer than new requests wait is as good as dead for these."""
        return REFUSED if victim == EVERYBODY else errors_without(stack, victim) & REFUSED


class SlowConnection(ConnectionFault):
    """Everything takes a tenth of a second longer in each direction."""

    name = "slow"
    hold = 5.0
    impairment = Impairment(delay=0.1)


class SilentConnection(ConnectionFault):
    """Nothing passes, and nobody is told: a link that is down for a while."""

    name = "silent"
    hold = 3.0
    impairment = Impairment(silent=True)


class CutConnection(ConnectionFault):
    """The connection breaks, and so does every new one for a while."""

    name = "cut"
    hold = 3.0
    impairment = Impairment(cut=True)


class RedisSession(Fault):
    """Redis ends every client's session (`CLIENT KILL`), as it does after its own timeouts."""

    name = "redis-session"

    def missing(self, stack: ChaosStack) -> str | None:
        """It needs the stack's own Redis."""
        return None if stack.state.redis_port is not None else "the stack has no Redis of its own (--redis)"

    def targets(self, stack: ChaosStack) -> Mapping[str, Sequence[str]]:
        """The one Redis."""
        return {"": [REDIS]}

    @contextlib.asynccontextmanager
    async def strike(self, stack: ChaosStack, victim: str) -> AsyncIterator[None]:
        """See `Fault.strike`."""
        await _order(stack, "CLIENT", "KILL", "TYPE", "NORMAL")
        yield


class RedisLoss(RedisSession):
    """Redis forgets everything that it holds, under its clients' feet (`FLUSHALL`)."""

    name = "redis-loss"

    @contextlib.asynccontextmanager
    async def strike(self, stack: ChaosStack, victim: str) -> AsyncIterator[None]:
        """See `Fault.strike`."""
        await _order(stack, "FLUSHALL")
        yield


async def _order(stack: ChaosStack, *command: str) -> None:
    from redis.asyncio import Redis  # of the KV store's dependencies: where there is a Redis, it is installed

    state = stack.state
    client: Any = Redis(port=state.redis_port or 0, password=state.redis_password)
    try:
        await client.execute_command(*command)
    finally:
        await client.aclose()
