"""Which host gets or loses engines when a pool is to have more or fewer. Pure."""

from __future__ import annotations

from collections.abc import Mapping

Host = str | None
"""A host that has joined, by its name; None: the first one, or the only one."""


def spread(present: Mapping[Host, int], target: int, *, most: int | None, keep: int = 0) -> dict[Host, int]:
    """How many of a pool's engines each host shall have, `target` in all. Engines come where the fewest are, to the
    first host before others, and go where the most are, from others before the first one; none moves.

    `most`: engines of the pool on one host; fewer than `target` come where no host has room. `keep`: of them on the
    first host, whose supervisor gives up no more.
    """
    counts = dict(present)
    while sum(counts.values()) < target:
        open_hosts = [host for host, count in counts.items() if most is None or count < most]
        if not open_hosts:
            break
        counts[min(open_hosts, key=lambda host: (counts[host], host or ""))] += 1
    while sum(counts.values()) > target:
        giving = [host for host, count in counts.items() if count > (keep if host is None else 0)]
        if not giving:
            break
        counts[max(giving, key=lambda host: (counts[host], host or ""))] -= 1
    return counts
