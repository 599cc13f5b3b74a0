"""What is wrong with the machine: its link, its disk, the model's files. All of these are chaos's own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import ClassVar

from deploy.chaos.clock import NOT_THERE
from deploy.chaos.faults.fault import REFUSED, FailureKind, Fault
from deploy.chaos.faults.processes import errors_without, services
from deploy.chaos.model_copy import Damage
from deploy.chaos.namespaces import NOT_PERMITTED, can_limit_rate, limit_rate, set_link
from deploy.chaos.stack import ChaosStack, Need

RATE = "16mbit"
DISK_BLOCK = bytes(4096)
CLOCK_JUMPS = {"forward": 3600, "back": -3600}
"""Seconds."""


class LinkDown(Fault):
    """The link over which everything goes is down (`ip link set lo down`): clients, bus, Redis and ranks."""

    name = "link-down"
    hold = 2.0
    needs = frozenset[Need]({"namespaces"})

    def missing(self, stack: ChaosStack) -> str | None:
        """It needs namespaces of its own."""
        return None if stack.has_namespaces else NOT_PERMITTED

    def targets(self, stack: ChaosStack) -> Mapping[str, Sequence[str]]:
        """The one link."""
        return {"": ["lo"]}

    @contextlib.asynccontextmanager
    async def strike(self, stack: ChaosStack, victim: str) -> AsyncIterator[None]:
        """See `Fault.strike`."""
        await asyncio.to_thread(set_link, False)
        try:
            yield
        finally:
            await asyncio.to_thread(set_link, True)

    def allowed(self, stack: ChaosStack, victim: str) -> frozenset[FailureKind]:
        """As without the bus."""
        return REFUSED


class LowRate(LinkDown):
    """The link carries RATE at most (`tc tbf`)."""

    name = "low-rate"
    hold = 5.0

    def missing(self, stack: ChaosStack) -> str | None:
        """It needs namespaces of its own, `tc`, and a kernel with tbf."""
        if (why := super().missing(stack)) is not None:
            return why
        return None if can_limit_rate() else "tc tbf is not there"

    @contextlib.asynccontextmanager
    async def strike(self, stack: ChaosStack, victim: str) -> AsyncIterator[None]:
        """See `Fault.strike`."""
        await asyncio.to_thread(limit_rate, RATE)
        try:
            yield
        finally:
            await asyncio.to_thread(limit_rate, None)


class FullDisk(Fault):
    """The disk of the logs and of the stack's state is full, and a process dies meanwhile."""

    name = "full-disk"
    hold = 5.0
    needs = frozenset[Need]({"namespaces", "disk"})

    def missing(self, stack: ChaosStack) -> str | None:
        """It needs a small disk, which needs namespaces."""
        return None if stack.has_namespaces else NOT_PERMITTED

    def targets(self, stack: ChaosStack) -> Mapping[str, Sequence[str]]:
        """Who dies: any actor."""
        return {"": [name for names in services(stack).values() for name in names]}

    @contextlib.asynccontextmanager
    async def strike(self, stack: ChaosStack, victim: str) -> AsyncIterator[None]:
        """See `Fault.strike`."""
        filling = stack.run_dir / "filling"
        await asyncio.to_thread(_fill, filling)
        try:
            stack.signal(victim, signal.SIGKILL)
            yield
        finally:
            filling.unlink(missing_ok=True)

    def allowed(self, stack: ChaosStack, victim: str) -> frozenset[FailureKind]:
        """As of one that is killed."""
        return errors_without(stack, victim)


def _fill(path: os.PathLike[str]) -> None:
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(DISK_BLOCK)


class ClockJump(Fault):
    """The clock of every process is put an hour forward or back, and afterwards right again."""

    name = "clock-jump"
    hold = 5.0
    needs = frozenset[Need]({"clock"})

    def missing(self, stack: ChaosStack) -> str | None:
        """It needs libfaketime."""
        return None if stack.clock is not None else NOT_THERE

    def targets(self, stack: ChaosStack) -> Mapping[str, Sequence[str]]:
        """Both directions."""
        return {way: [way] for way in CLOCK_JUMPS}

    @contextlib.asynccontextmanager
    async def strike(self, stack: ChaosStack, victim: str) -> AsyncIterator[None]:
        """See `Fault.strike`."""
        assert stack.clock is not None, "it was asked for"
        stack.clock.shift(CLOCK_JUMPS[victim])
        try:
            yield
        finally:
            stack.clock.shift(0)


class MissingWeights(Fault):
    """A rank dies, and the weights that the next one needs are not there."""

    name = "weights-missing"
    hold = 6.0
    needs = frozenset[Need]({"model copy"})
    damage: ClassVar[Damage] = "missing"

    def targets(self, stack: ChaosStack) -> Mapping[str, Sequence[str]]:
        """Every rank."""
        ranks = {member.instance for member in stack.state.members if member.rank is not None}
        found = {row: [name for name in names if name in ranks] for row, names in services(stack).items()}
        return {row: names for row, names in found.items() if names}

    @contextlib.asynccontextmanager
    async def strike(self, stack: ChaosStack, victim: str) -> AsyncIterator[None]:
        """See `Fault.strike`."""
        copy = stack.model_copy
        assert copy is not None, "it was asked for"
        copy.damage(self.damage)
        try:
            stack.signal(victim, signal.SIGKILL)
            yield
        finally:
            copy.repair()

    def allowed(self, stack: ChaosStack, victim: str) -> frozenset[FailureKind]:
        """As of one that is killed."""
        return errors_without(stack, victim)


class TruncatedWeights(MissingWeights):
    """A rank dies, and of the weights that the next one needs only the beginning is there."""

    name = "weights-truncated"
    damage = "truncated"
