"""How the GPUs of a machine are joined: NVLink, one PCIe switch, one NUMA node, or the link between sockets.

As `nvidia-smi topo --matrix` shows it, whose words these are, and which is read here, too: a recorded matrix is as good
as NVML. https://docs.nvidia.com/deploy/nvidia-smi/index.html
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

SELF = "X"
CLOSENESS = {"SYS": 1, "NODE": 2, "PHB": 3, "PXB": 4, "PIX": 5}
"""Of two GPUs that no NVLink joins; more is closer. SYS: on two NUMA nodes. The others are on one node: NODE crosses it
between host bridges, PHB one host bridge, PXB several PCIe switches, PIX one."""
NVLINK = 10
"""Closeness of two GPUs that one NVLink joins, one more for each further link."""
MIN_SAME_NODE = CLOSENESS["NODE"]

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_LINKS = re.compile(r"NV([0-9]+)", re.ASCII)
_GPU = re.compile(r"GPU[0-9]+", re.ASCII)


class TopologyError(ValueError):
    """A text is no matrix of `nvidia-smi topo -m`."""


class GpuTopology(Struct, frozen=True):
    """The GPUs that processes of this machine see, in CUDA's order."""

    links: tuple[tuple[str, ...], ...]
    """For each GPU and each other one what joins them: NV18, PIX, PXB, PHB, NODE, SYS; X with itself."""
    nodes: tuple[int | None, ...]
    """Of each GPU the NUMA node that it hangs on; None where that is not known."""
    names: tuple[str, ...] = ()
    """What the maker calls each; empty where that is not known."""

    def __len__(self) -> int:
        return len(self.links)

    def closeness(self, one: int, other: int) -> int:
        """How near two different GPUs are to each other: NVLINK or more where an NVLink joins them, else as in
        CLOSENESS."""
        link = self.links[one][other]
        joined = _LINKS.fullmatch(link)
        return NVLINK - 1 + int(joined[1]) if joined is not None else CLOSENESS[link]

    def joint(self, gpus: Sequence[int]) -> str:
        """What joins a group at its weakest place, for people; empty for a single GPU."""
        pairs = [(one, other) for one in gpus for other in gpus if one < other]
        weakest = min(pairs, key=lambda pair: self.closeness(*pair), default=None)
        return "" if weakest is None else self.links[weakest[0]][weakest[1]]

    def only(self, visible: Sequence[int]) -> GpuTopology:
        """That of some GPUs, in this order."""
        return GpuTopology(
            tuple(tuple(self.links[one][other] for other in visible) for one in visible),
            tuple(self.nodes[one] for one in visible),
            tuple(self.names[one] for one in visible) if self.names else (),
        )


def parse_matrix(text: str) -> GpuTopology:
    """Reads what `nvidia-smi topo -m` prints. Raises TopologyError."""
    lines = [_ANSI.sub("", line).split() for line in text.splitlines()]
    header = next((cells for cells in lines if cells and _GPU.fullmatch(cells[0]) and SELF not in cells), None)
    if header is None:
        raise TopologyError("no line with GPU0 GPU1 … is there")
    devices = header[: header.index("CPU")] if "CPU" in header else header
    count = sum(_GPU.fullmatch(device) is not None for device in devices)
    rows = [
        cells for cells in lines if len(cells) > count and _GPU.fullmatch(cells[0]) and SELF in cells[1 : count + 1]
    ]
    if len(rows) != count:
        raise TopologyError(f"{count} GPUs are named, and {len(rows)} rows are there")
    links = tuple(tuple(row[1 : count + 1]) for row in rows)
    for number, row in enumerate(links):
        for other, link in enumerate(row):
            if (link == SELF) != (number == other) or (link != SELF and not _is_link(link)):
                raise TopologyError(f"GPU{number}, GPU{other}: {link} is none of NV#, {', '.join(CLOSENESS)}")
    # Behind the links: other devices, the processors, the node.
    behind = [row[len(devices) + 2 : len(devices) + 3] for row in rows]
    return GpuTopology(links, tuple(int(cells[0]) if cells and cells[0].isdecimal() else None for cells in behind))


def visible_gpus(setting: str | None, uuids: Sequence[str]) -> list[int] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES (`setting`; None: it is not set) leaves, in its order, as indices of `uuids`,
    which are those of all GPUs. None where it names what is no GPU here, such as a part of one (MIG).

    https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html
    """
    if setting is None:
        return list(range(len(uuids)))
    found: list[int] = []
    for entry in filter(None, map(str.strip, setting.split(","))):
        if entry.isdecimal():
            matching = [int(entry)] if int(entry) < len(uuids) else []
        else:
            matching = [
                index for index, uuid in enumerate(uuids) if entry.startswith("GPU-") and uuid.startswith(entry)
            ]
        if len(matching) != 1 or matching[0] in found:
            return None
        found += matching
    return found


def _is_link(text: str) -> bool:
    return text in CLOSENESS or _LINKS.fullmatch(text) is not None
