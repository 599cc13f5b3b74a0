"""What each process of the server spent on a run, so that the next bottleneck has a name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple


class CpuReading(NamedTuple):
    """What a process has used since it began."""

    actor: str
    """The kind of process: gateway, scheduler, nats-server."""
    seconds: float
    """Processor time in seconds."""
    sleeps: int
    """How often its main thread went to sleep and was woken up."""


class CpuShare(NamedTuple):
    """What one process, or all of a kind, spent on a run."""

    name: str
    actor: str
    seconds: float
    us_per_token: float
    """Microseconds for each output token."""
    cores: float
    """Processors kept busy, on average."""
    sleeps_per_1000_tokens: float


def cpu_shares(
    before: Mapping[str, CpuReading], after: Mapping[str, CpuReading], tokens: int, duration: float
) -> list[CpuShare]:
    """What each process used between two readings, the hungriest first. A process that is in only one is left out: it
    was started or has ended meanwhile."""
    parts = []
    for name, then in before.items():
        if (now := after.get(name)) is not None:
            seconds, sleeps = now.seconds - then.seconds, now.sleeps - then.sleeps
            per_token, per_1000 = (seconds / tokens * 1e6, sleeps / tokens * 1e3) if tokens else (0.0, 0.0)
            parts.append(CpuShare(name, now.actor, seconds, per_token, seconds / max(duration, 1e-9), per_1000))
    return sorted(parts, key=_busiest_first)


def by_actor(parts: Sequence[CpuShare]) -> list[CpuShare]:
    """Together what is of one kind, as it can be scaled; the hungriest first."""
    alike = groupby(sorted(parts, key=lambda part: part.actor), key=lambda part: part.actor)
    summed = [_summed(actor, list(members)) for actor, members in alike]
    return sorted(summed, key=_busiest_first)


def total(parts: Sequence[CpuShare]) -> CpuShare:
    """The sum over all processes, called `all`."""
    return _summed("all", parts)._replace(name="all")


def _busiest_first(part: CpuShare) -> float:
    return -part.seconds


def _summed(actor: str, parts: Sequence[CpuShare]) -> CpuShare:
    return CpuShare(
        actor if len(parts) == 1 else f"{actor} × {len(parts)}",
        actor,
        sum(part.seconds for part in parts),
        sum(part.us_per_token for part in parts),
        sum(part.cores for part in parts),
        sum(part.sleeps_per_1000_tokens for part in parts),
    )


def parse_pids(text: str) -> dict[str, int]:
    """`engine-1=4711,gateway=4712` as pids by name. Raises ValueError."""
    pids = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, _, pid = pair.rpartition("=")
        if not name or not pid.isdecimal():
            raise ValueError(f"{pair!r}: NAME=PID is expected")
        pids[name] = int(pid)
    return pids
