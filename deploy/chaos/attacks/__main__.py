"""`python -m deploy.chaos.attacks NAME`: one attack, in a process of its own, so that the good clients' times are not
those of the attacker's event loop. The victim comes by standard input, what was answered goes to standard output."""

from __future__ import annotations

import asyncio
import contextlib
import sys

import msgspec

from deploy.chaos.attacks.attack import Attack, AttackCounts, AttackReport, Victim
from deploy.chaos.attacks.bodies import BODY_ATTACKS
from deploy.chaos.attacks.sockets import SOCKET_ATTACKS

ATTACKS: dict[str, Attack] = {**SOCKET_ATTACKS, **BODY_ATTACKS}
MAX_SECONDS = 180.0
"""After which an attack ends, however much of it is left."""


async def _attack(name: str, victim: Victim) -> AttackReport:
    counts = AttackCounts()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(MAX_SECONDS):
            await ATTACKS[name](victim, counts)
    return counts.report()


def main() -> None:
    """Attacks once."""
    victim = msgspec.json.decode(sys.stdin.buffer.read(), type=Victim)
    report = asyncio.run(_attack(sys.argv[1], victim))
    sys.stdout.buffer.write(msgspec.json.encode(report))


if __name__ == "__main__":
    main()
