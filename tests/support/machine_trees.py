"""sysfs as machines of several kinds show it, written into a folder: what the code under test reads of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

GIB = 2**30


class NodeTree(NamedTuple):
    """A NUMA node's files."""

    cpulist: str
    memory: int
    distance: str


TWO_SOCKETS = {
    0: NodeTree("0-31,64-95", 256 * GIB, "10 21"),
    1: NodeTree("32-63,96-127", 256 * GIB, "21 10"),
}
"""Two Xeon 8358 with hyper-threading, as `numactl --hardware` shows them."""
EPYC_NPS4 = {
    number: NodeTree(
        f"{16 * number}-{16 * number + 15},{128 + 16 * number}-{128 + 16 * number + 15}",
        64 * GIB,
        " ".join("10" if other == number else "12" if other // 4 == number // 4 else "32" for other in range(8)),
    )
    for number in range(8)
}
"""Two EPYC 7763 with four nodes per socket."""
ONE_NODE = {0: NodeTree("0-15", 64 * GIB, "10")}
WITH_CXL = {
    0: NodeTree("0-47", 512 * GIB, "10 21 14"),
    1: NodeTree("48-95", 512 * GIB, "21 10 24"),
    2: NodeTree("", 256 * GIB, "14 24 10"),
}
"""Two sockets and a CXL memory expander at the first."""


def write_machine(
    sysfs: Path, nodes: Mapping[int, NodeTree], gpus: Mapping[str, int] | None = None, threads_apart: int = 0
) -> Path:
    """The tree below `sysfs`. `gpus`: NUMA node by PCI address; `threads_apart`: from a processor to the other thread
    of its core, 0 where each core has one."""
    for number, node in nodes.items():
        folder = sysfs / "devices" / "system" / "node" / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(node.cpulist + "\n")
        (folder / "distance").write_text(node.distance + "\n")
        kilobytes = node.memory // 1024
        (folder / "meminfo").write_text(
            f"\nNode {number} MemTotal:       {kilobytes} kB\nNode {number} MemFree:        {kilobytes // 2} kB\n"
        )
        if threads_apart:
            _write_siblings(sysfs, node, threads_apart)
    for address, number in (gpus or {}).items():
        folder = sysfs / "bus" / "pci" / "devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{number}\n")
        (folder / "local_cpulist").write_text(nodes[number].cpulist + "\n")
    return sysfs


def _write_siblings(sysfs: Path, node: NodeTree, apart: int) -> None:
    first = node.cpulist.split(",")[0].split("-")
    for core in range(int(first[0]), int(first[-1]) + 1):
        for cpu in (core, core + apart):
            folder = sysfs / "devices" / "system" / "cpu" / f"cpu{cpu}" / "topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(f"{core},{core + apart}\n")
