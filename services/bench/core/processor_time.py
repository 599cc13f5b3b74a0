"""What each process of the server spent on a run, so that the next bottleneck has a name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Share(NamedTuple):
    name: str
    seconds: float
    per_1000_tokens: float
    cores: float
    """Processors kept busy, on average."""


def shares(before: Mapping[str, float], after: Mapping[str, float], tokens: int, duration: float) -> list[Share]:
    """Processor seconds by process between two readings, the hungriest first. Who is in one reading only is left
    out: it was started or has ended meanwhile."""
    spent = {name: after[name] - seconds for name, seconds in before.items() if name in after}
    ordered = sorted(spent.items(), key=lambda item: -item[1])
    return [
        Share(name, seconds, seconds / tokens * 1000 if tokens else 0.0, seconds / max(duration, 1e-9))
        for name, seconds in ordered
    ]


def total(parts: Sequence[Share]) -> Share:
    return Share(
        "all", sum(p.seconds for p in parts), sum(p.per_1000_tokens for p in parts), sum(p.cores for p in parts)
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
