"""The NUMA nodes of this machine, as Linux shows them in sysfs: which processors and how much memory each has.

A processor reads the memory of its own node faster than that of others. https://docs.kernel.org/mm/numa.html,
https://docs.kernel.org/admin-guide/mm/numaperf.html
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from shared.settings import UpOption

SYSFS = Path("/sys")

Cpus = frozenset[int]

NumaMode = Annotated[
    Literal["auto", "bind", "off"],
    Meta(
        description="On machines with several NUMA nodes. auto: engines are spread over them, with processors of one "
        "node and its memory as long as there is room; bind: and no other memory; off: the operating system decides."
    ),
    UpOption("Capacity"),
]
"""A setting of whoever keeps memory beside its processors."""


class CpuListError(ValueError):
    """A text is no list of processors."""


class NumaNode(NamedTuple):
    """A part of the memory, and the processors beside it."""

    number: int
    cpus: Cpus
    """Empty: memory only, such as a CXL expander's."""
    memory: int
    """Bytes; 0 where it has none, or the system does not say."""
    distances: tuple[int, ...] = ()
    """To each node of the machine, in the order of `read_nodes`: 10 to itself, 20 where access takes twice as long.
    Empty where the system does not say."""


class NumaShare(NamedTuple):
    """What a process gets of the machine where it computes on processors: one of some even parts of nodes."""

    nodes: tuple[int, ...]
    part: int = 0
    """From 0."""
    parts: int = 1

    @classmethod
    def parse(cls, text: str) -> NumaShare:
        """`0:1/2`: the second half of node 0; `0,1:0/1`: two nodes as a whole. Raises ValueError."""
        found = _SHARE.fullmatch(text)
        if found is None or not int(found[2]) < int(found[3]):
            raise ValueError(f"{text!r}: nodes, part and number of parts are expected, such as 0:1/2 or 0,1:0/1")
        return cls(tuple(map(int, found[1].split(","))), int(found[2]), int(found[3]))

    def __str__(self) -> str:
        return f"{','.join(map(str, self.nodes))}:{self.part}/{self.parts}"

    def cpus(self, nodes: Sequence[NumaNode], sysfs: Path = SYSFS) -> Cpus | None:
        """Its processors of those of `nodes`; None where it would have none."""
        own = frozenset[int]().union(*(node.cpus for node in nodes if node.number in self.nodes))
        return even_part(own, self.part, self.parts, sysfs)


_SHARE = re.compile(r"([0-9]+(?:,[0-9]+)*):([0-9]+)/([0-9]+)", re.ASCII)


def parse_cpus(text: str) -> Cpus:
    """`0-3,8` as Linux writes lists of processors. Raises CpuListError."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        if not (first.isascii() and first.isdigit() and (not dash or (last.isascii() and last.isdigit()))):
            raise CpuListError(f"{text!r} is no list of processors; e.g. 0-3,8")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def format_cpus(cpus: Iterable[int]) -> str:
    """The list that `parse_cpus` reads, with runs joined."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def allowed_cpus() -> Cpus | None:
    """The processors that this process may use; None if the system cannot tell."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def read_nodes(sysfs: Path = SYSFS) -> list[NumaNode]:
    """All nodes that are online, by number; none where the system does not say: other kernels, and sandboxes."""
    folder = sysfs / "devices" / "system" / "node"
    try:
        numbers = sorted(int(each.name.removeprefix("node")) for each in folder.glob("node[0-9]*"))
    except (OSError, ValueError):
        return []
    return [node for number in numbers if (node := _read_node(folder / f"node{number}", number)) is not None]


def compute_nodes(nodes: Sequence[NumaNode], allowed: Cpus) -> list[NumaNode]:
    """Those with processors that may be used, and with no others."""
    return [node._replace(cpus=node.cpus & allowed) for node in nodes if node.cpus & allowed]


def nodes_of(cpus: Cpus, nodes: Sequence[NumaNode]) -> list[int]:
    """The numbers of the nodes that these processors are on and that have memory."""
    return [node.number for node in nodes if node.memory and node.cpus & cpus]


def even_part(cpus: Cpus, number: int, count: int, sysfs: Path = SYSFS) -> Cpus | None:
    """The `number`-th of `count` even parts; threads of one core stay together. None where cores are too few."""
    cores = sorted({tuple(sorted(_siblings(cpu, sysfs) & cpus)) for cpu in cpus})
    part = cores[number * len(cores) // count : (number + 1) * len(cores) // count]
    return frozenset(cpu for core in part for cpu in core) or None


def _read_node(folder: Path, number: int) -> NumaNode | None:
    """None where it has gone, or nobody may read it."""
    try:
        cpus = parse_cpus((folder / "cpulist").read_text())
    except (OSError, CpuListError):
        return None
    return NumaNode(number, cpus, _memory(folder), _distances(folder))


def _memory(folder: Path) -> int:
    try:
        found = re.search(r"MemTotal:\s+(\d+) kB", (folder / "meminfo").read_text())
    except OSError:
        return 0
    return 1024 * int(found[1]) if found else 0


def _distances(folder: Path) -> tuple[int, ...]:
    try:
        return tuple(map(int, (folder / "distance").read_text().split()))
    except (OSError, ValueError):
        return ()


def _siblings(cpu: int, sysfs: Path) -> Cpus:
    path = sysfs / "devices" / "system" / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list"
    return parse_cpus(path.read_text()) if path.exists() else frozenset({cpu})
