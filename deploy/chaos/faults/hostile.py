"""Clients that mean harm, beside the good ones; and calm, which the others are compared with."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec

from deploy.chaos.attacks.attack import AttackReport, Victim
from deploy.chaos.attacks.bodies import BODY_ATTACKS
from deploy.chaos.attacks.sockets import SOCKET_ATTACKS
from deploy.chaos.faults.fault import Fault
from deploy.chaos.stack import ChaosStack
from deploy.chaos.usage import descriptors
from deploy.errors import CommandError

ATTACKER = "deploy.chaos.attacks"
ATTACK_DEADLINE = 240.0
"""Seconds; the process that attacks ends by itself before."""
RETURN_DEADLINE = 20.0
"""Seconds after an attack within which every process has given back its file descriptors."""
SPARE_DESCRIPTORS = 16
"""By which a process may have more than before: the good clients open connections, too."""
POLL = 0.1


class Calm(Fault):
    """No fault: shows how long the good clients' pauses are without an attack."""

    name = "calm"
    hold = 10.0

    def targets(self, stack: ChaosStack) -> Mapping[str, Sequence[str]]:
        """The stack as a whole."""
        return {"": ["nobody"]}

    @contextlib.asynccontextmanager
    async def strike(self, stack: ChaosStack, victim: str) -> AsyncIterator[None]:
        """See `Fault.strike`."""
        yield


class HostileClients(Fault):
    """One kind of attack. No process may die of it, keep its file descriptors, or answer a 5xx but a 503 that says when
    to come again; and the good clients notice nothing but the time that it takes."""

    name = "hostile"

    def targets(self, stack: ChaosStack) -> Mapping[str, Sequence[str]]:
        """The attacks by name."""
        return {name: [name] for name in (*SOCKET_ATTACKS, *BODY_ATTACKS)}

    @contextlib.asynccontextmanager
    async def strike(self, stack: ChaosStack, victim: str) -> AsyncIterator[None]:
        """See `Fault.strike`. What no client may be answered, and what was not given back, is a complaint."""
        state = stack.state
        before = descriptors(state)
        report = await _attack(victim, Victim.at(state.url, state.api_key, state.model))
        yield
        stack.notes.append(report.answers)
        stack.complaints += [*report.complaints, *await _kept(stack, before)]


async def _attack(name: str, victim: Victim) -> AttackReport:
    """Done by another process. Raises CommandError where that fails, or does not end in time."""
    pipe = asyncio.subprocess.PIPE
    argv = (sys.executable, "-m", ATTACKER, name)
    process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe)
    try:
        async with asyncio.timeout(ATTACK_DEADLINE):
            said, _ = await process.communicate(msgspec.json.encode(victim))
        return msgspec.json.decode(said, type=AttackReport)
    except (TimeoutError, msgspec.MsgspecError):
        raise CommandError(f"the attack {name} itself failed") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _kept(stack: ChaosStack, before: Mapping[str, tuple[int, int]]) -> list[str]:
    """Which processes have ended, or not given back their file descriptors within RETURN_DEADLINE."""
    end = time.monotonic() + RETURN_DEADLINE
    while (found := _differences(before, descriptors(stack.state))) and time.monotonic() < end:
        await asyncio.sleep(POLL)
    return found


def _differences(before: Mapping[str, tuple[int, int]], now: Mapping[str, tuple[int, int]]) -> list[str]:
    found = []
    for name, (pid, count) in before.items():
        if name not in now or now[name][0] != pid:
            found.append(f"{name} has died")
        elif now[name][1] > count + SPARE_DESCRIPTORS:
            found.append(f"{name}: {now[name][1]} file descriptors, {count} before")
    return found
