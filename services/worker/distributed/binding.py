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

from shared.machine.memory_policy import MemoryPolicy, set_memory_policy
from shared.machine.numa import (
    SYSFS,
    CpuListError,
    Cpus,
    NumaShare,
    allowed_cpus,
    compute_nodes,
    even_part,
    nodes_of,
    parse_cpus,
    read_nodes,
)


class BindingError(ValueError):
    """The processors that were asked for cannot be had."""


class Rank(NamedTuple):
    """A rank among those of its engine."""

    number: int
    """Among the ranks of its engine."""
    world_size: int


def chosen_cpus(asked: str, allowed: Cpus) -> Cpus:
    """A list that the user gave. Raises BindingError where it names none, or one that this process may not use."""
    try:
        cpus = parse_cpus(asked)
    except CpuListError as error:
        raise BindingError(str(error)) from None
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
    return even_part(own & allowed, sharing.index(index), len(sharing), sysfs)


def cpus_of_rank(rank: Rank, allowed: Cpus, sysfs: Path = SYSFS) -> Cpus | None:
    """This rank's share of the memory nodes' processors; None where there are more nodes than ranks, or one node."""
    nodes = [node.cpus for node in compute_nodes(read_nodes(sysfs), allowed)]
    if not 1 < len(nodes) <= rank.world_size:
        return None
    own = rank.number * len(nodes) // rank.world_size
    sharing = [r for r in range(rank.world_size) if r * len(nodes) // rank.world_size == own]
    return even_part(nodes[own], sharing.index(rank.number), len(sharing), sysfs)


def cpus_of_share(share: str, allowed: Cpus, sysfs: Path = SYSFS) -> Cpus | None:
    """The processors of a share as `NumaShare` writes it; None where this process may use none of them. Raises
    BindingError."""
    try:
        return NumaShare.parse(share).cpus(compute_nodes(read_nodes(sysfs), allowed), sysfs)
    except ValueError as error:
        raise BindingError(f"numa_share = {error}") from None


def bind_memory(cpus: Cpus, *, strict: bool, sysfs: Path = SYSFS) -> list[int]:
    """Memory that this thread touches first, and those that it starts, comes from the nodes of these processors, of
    several in turn; `strict`: and from no other, else as long as they have room. The nodes; none on a machine with one,
    where nothing is changed. Raises OSError."""
    nodes = read_nodes(sysfs)
    near = nodes_of(cpus, nodes)
    if not near or sum(node.memory > 0 for node in nodes) < 2:
        return []
    one = MemoryPolicy.PREFERRED if len(near) == 1 else MemoryPolicy.INTERLEAVE
    set_memory_policy(MemoryPolicy.BIND if strict else one, near)
    return near


def bind(cpus: Cpus) -> None:
    """All threads of this process, and those that they start from now on, run on `cpus` only."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread may end any time
            os.sched_setaffinity(int(thread.name), cpus)


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
