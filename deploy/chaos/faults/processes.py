"""Processes that die, stand still for good, stand still for a while, or are asked to end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Mapping, Sequence

from deploy.chaos.faults.fault import CONNECTION, NOTHING, REFUSED, FailureKind, Fault
from deploy.chaos.stack import SUPERVISOR, ChaosStack, send
from deploy.supervisor.servers.nats import NAME as BUS
from deploy.supervisor.state_file import MemberRecord

SUPERVISOR_AWAY = 2.0
"""Seconds between the death of the supervisor and the next `baton up`."""


def row_name(member: MemberRecord) -> str:
    """The matrix's name for all processes that do the same: a service, or a rank of a kind of engine."""
    pool = "" if member.pool in (None, "engines") else f"{member.pool} "
    return f"{pool}rank {member.rank}" if member.rank is not None else f"{pool}{member.service}"


def services(stack: ChaosStack) -> dict[str, list[str]]:
    """Every actor of the stack, by row."""
    found: dict[str, list[str]] = {}
    for member in stack.state.members:
        found.setdefault(row_name(member), []).append(member.instance)
    return found


def servers(stack: ChaosStack) -> dict[str, list[str]]:
    """What is no actor: the bus, Redis, the keeper."""
    state = stack.state
    actors = {member.instance for member in state.members}
    return {name: [name] for name in state.processes if name not in actors}


class Kill(Fault):
    """`kill -9`: the supervisor starts it anew; the supervisor itself is started by hand."""

    name = "kill"

    def targets(self, stack: ChaosStack) -> Mapping[str, Sequence[str]]:
        """Every process there is."""
        return {**services(stack), **servers(stack), SUPERVISOR: [SUPERVISOR]}

    @contextlib.asynccontextmanager
    async def strike(self, stack: ChaosStack, victim: str) -> AsyncIterator[None]:
        """See `Fault.strike`."""
        stack.signal(victim, signal.SIGKILL)
        yield
        if victim == SUPERVISOR:
            await asyncio.sleep(SUPERVISOR_AWAY)
            await asyncio.to_thread(stack.start)

    def allowed(self, stack: ChaosStack, victim: str) -> frozenset[FailureKind]:
        """A gateway takes its connections with it; new requests may be refused where nobody is left who could serve
        them."""
        return errors_without(stack, victim)


class Terminate(Kill):
    """SIGTERM: what ends in order, and is started anew."""

    name = "terminate"

    def targets(self, stack: ChaosStack) -> Mapping[str, Sequence[str]]:
        """Every process but the supervisor, which would end the stack, and the keeper, which is for that."""
        return {**services(stack), **{name: found for name, found in servers(stack).items() if name != "keeper"}}

    @contextlib.asynccontextmanager
    async def strike(self, stack: ChaosStack, victim: str) -> AsyncIterator[None]:
        """See `Fault.strike`."""
        stack.signal(victim, signal.SIGTERM)
        yield


class Stop(Fault):
    """SIGSTOP for good: a process that hangs. A rank that others wait for in a collective is one."""

    name = "stop"

    def targets(self, stack: ChaosStack) -> Mapping[str, Sequence[str]]:
        """Every actor: the supervisor replaces one that says nothing."""
        return services(stack)

    @contextlib.asynccontextmanager
    async def strike(self, stack: ChaosStack, victim: str) -> AsyncIterator[None]:
        """See `Fault.strike`."""
        stack.signal(victim, signal.SIGSTOP)
        yield

    def deadline(self, stack: ChaosStack, victim: str) -> float:
        """The supervisor's limit of silence."""
        return stack.state.spec.silence_limit

    def allowed(self, stack: ChaosStack, victim: str) -> frozenset[FailureKind]:
        """As of one that is killed."""
        return errors_without(stack, victim)


class Pause(Fault):
    """SIGSTOP, and SIGCONT before anybody replaces it: a process that the machine gave no time."""

    name = "pause"
    hold = 3.0

    def targets(self, stack: ChaosStack) -> Mapping[str, Sequence[str]]:
        """Every process there is."""
        return {**services(stack), **servers(stack), SUPERVISOR: [SUPERVISOR]}

    @contextlib.asynccontextmanager
    async def strike(self, stack: ChaosStack, victim: str) -> AsyncIterator[None]:
        """See `Fault.strike`."""
        identity = stack.signal(victim, signal.SIGSTOP)
        try:
            yield
        finally:
            if identity is not None:
                send(identity, signal.SIGCONT)

    def allowed(self, stack: ChaosStack, victim: str) -> frozenset[FailureKind]:
        """Who is silent for longer than new requests wait is as good as dead for these."""
        return errors_without(stack, victim) & REFUSED


def errors_without(stack: ChaosStack, victim: str) -> frozenset[FailureKind]:
    """How streams may fail while a process is not there."""
    member = stack.member(victim)
    if member is None:
        return REFUSED if victim == BUS else NOTHING
    if member.service == "gateway":
        return CONNECTION
    if member.service == "kvstore":
        return NOTHING
    # Engines of all kinds stand in for each other: docs/adr/0008.
    others = len(stack.engines()) - 1 if member.engine is not None else stack.peers(victim) - 1
    return NOTHING if others else REFUSED
