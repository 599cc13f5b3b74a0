"""Which of the machine's processors a rank computes on: those beside its GPU, or beside a share of the memory.

A GPU hangs on one NUMA node; threads and page-locked memory on another one pay for every byte that crosses between
them. A rank on processors reads its weights fastest where they lie, so ranks are spread over the nodes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SYSFS = Path("/sys")

Cpus = frozenset[int]


class BindingError(ValueError):
    """The processors that were asked for cannot be had."""


class Rank(NamedTuple):
    """A rank among those of its engine."""

    number: int
    """Among the ranks of its engine."""
    world_size: int


def parse_cpus(text: str) -> Cpus:
    """`0-3,8` as Linux writes lists of processors. Raises BindingError."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        if not (first.isascii() and first.isdigit() and (not dash or (last.isascii() and last.isdigit()))):
            raise BindingError(f"{text!r} is no list of processors; e.g. 0-3,8")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def chosen_cpus(asked: str, allowed: Cpus) -> Cpus:
    """A list that the user gave. Raises BindingError where it names none, or one that this process may not use."""
    cpus = parse_cpus(asked)
    if not cpus or not cpus <= allowed:
        raise BindingError(f"bind = {asked}: auto, none or some of the processors {sorted(allowed)} are possible")
    return cpus


def cpus_of_gpu(addresses: Sequence[str], index: int, allowed: Cpus, sysfs: Path = SYSFS) -> Cpus | None:
    """This GPU's share of the processors beside it, GPUs beside the same ones having as many each.

    `addresses`: of all GPUs that this process sees, as PCI writes them. None where the system does not say.
    """
    beside = [_beside(address, sysfs) for address in addresses]
    own = beside[index]
    if own is None or not own & allowed:
        return None
    sharing = [number for number, cpus in enumerate(beside) if cpus == own]
    return _part(own & allowed, sharing.index(index), len(sharing), sysfs)


def cpus_of_rank(rank: Rank, allowed: Cpus, sysfs: Path = SYSFS) -> Cpus | None:
    """This rank's share of the memory nodes' processors; None where there are more nodes than ranks, or one node."""
    nodes = [cpus & allowed for cpus in _nodes(sysfs) if cpus & allowed]
    if not 1 < len(nodes) <= rank.world_size:
        return None
    own = rank.number * len(nodes) // rank.world_size
    sharing = [r for r in range(rank.world_size) if r * len(nodes) // rank.world_size == own]
    return _part(nodes[own], sharing.index(rank.number), len(sharing), sysfs)


def bind(cpus: Cpus) -> None:
    """All threads of this process, and those that they start from now on, run on `cpus` only."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread may end any time
            os.sched_setaffinity(int(thread.name), cpus)


def allowed_cpus() -> Cpus | None:
    """The processors that this process may use; None if the system cannot tell."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def available_cores() -> int:
    """How many this process may use."""
    allowed = allowed_cpus()
    return os.cpu_count() or 1 if allowed is None else len(allowed)


def _beside(address: str, sysfs: Path) -> Cpus | None:
    """The processors local to a PCI device; None where the system does not say: sandboxes have no such files, or let
    nobody read them."""
    try:
        return parse_cpus((sysfs / "bus" / "pci" / "devices" / address.lower() / "local_cpulist").read_text())
    except OSError:
        return None


def _nodes(sysfs: Path) -> list[Cpus]:
    folder = sysfs / "devices" / "system" / "node"
    numbered = sorted(folder.glob("node[0-9]*"), key=lambda node: int(node.name.removeprefix("node")))
    return [parse_cpus((node / "cpulist").read_text()) for node in numbered]


def _part(cpus: Cpus, number: int, count: int, sysfs: Path) -> Cpus | None:
    """The `number`-th of `count` even parts; threads of one core stay together. None where cores are too few."""
    cores = sorted({tuple(sorted(_siblings(cpu, sysfs) & cpus)) for cpu in cpus})
    part = cores[number * len(cores) // count : (number + 1) * len(cores) // count]
    return frozenset(cpu for core in part for cpu in core) or None


def _siblings(cpu: int, sysfs: Path) -> Cpus:
    path = sysfs / "devices" / "system" / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list"
    return parse_cpus(path.read_text()) if path.exists() else frozenset({cpu})
