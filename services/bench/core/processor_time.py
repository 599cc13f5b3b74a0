"""What each process of the server spent on a run, so that the next bottleneck has a name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple


class Reading(NamedTuple):
    """What a process has used since it began."""

    actor: str
    """What it is: gateway, scheduler, nats-server."""
    seconds: float
    """Of processor time."""
    sleeps: int
    """Times that its main thread had nothing to do, and was woken up again."""


class Share(NamedTuple):
    name: str
    actor: str
    seconds: float
    us_per_token: float
    """Microseconds for each output token."""
    cores: float
    """Processors kept busy, on average."""
    sleeps_per_1000_tokens: float


def shares(before: Mapping[str, Reading], after: Mapping[str, Reading], tokens: int, duration: float) -> list[Share]:
    """What each process used between two readings, the hungriest first. Who is in one reading only is left out: it was
    started or has ended meanwhile."""
    parts = []
    for name, then in before.items():
        if (now := after.get(name)) is not None:
            seconds, sleeps = now.seconds - then.seconds, now.sleeps - then.sleeps
            per_token, per_1000 = (seconds / tokens * 1e6, sleeps / tokens * 1e3) if tokens else (0.0, 0.0)
            parts.append(Share(name, now.actor, seconds, per_token, seconds / max(duration, 1e-9), per_1000))
    return sorted(parts, key=_hunger)


def by_actor(parts: Sequence[Share]) -> list[Share]:
    """Together what is of one kind, as it can be scaled; the hungriest first."""
    alike = groupby(sorted(parts, key=lambda part: part.actor), key=lambda part: part.actor)
    summed = [_summed(actor, list(members)) for actor, members in alike]
    return sorted(summed, key=_hunger)


def total(parts: Sequence[Share]) -> Share:
    return _summed("all", parts)._replace(name="all")


def _hunger(part: Share) -> float:
    return -part.seconds


def _summed(actor: str, parts: Sequence[Share]) -> Share:
    return Share(
        actor if len(parts) == 1 else f"{actor} × {len(parts)}",
        actor,
        sum(part.seconds for part in parts),
        sum(part.us_per_token for part in parts),
        sum(part.cores for part in parts),
        sum(part.sleeps_per_1000_tokens for part in parts),
    )


class ProcessError(ValueError):
    """Processes that were named wrongly; the text names the pair."""


def parse_pids(text: str) -> dict[str, int]:
    """`engine-1=4711,gateway=4712` as pids by name. Raises ProcessError."""
    pids = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, _, pid = pair.rpartition("=")
        if not name or not pid.isdecimal():
            raise ProcessError(f"{pair!r}: NAME=PID is expected")
        pids[name] = int(pid)
    return pids
