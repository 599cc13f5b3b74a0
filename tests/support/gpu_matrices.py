"""What `nvidia-smi topo -m` printed on machines of several kinds."""

from __future__ import annotations

_HEAD = "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tGPU5\tGPU6\tGPU7"


def _nvswitch_row(gpu: int) -> str:
    links = "\t".join(" X " if other == gpu else "NV18" for other in range(8))
    nics = "\t".join("PIX" if nic == gpu % 4 and gpu < 4 else "SYS" for nic in range(4))
    cpus, node = ("0-55,112-167", 0) if gpu < 4 else ("56-111,168-223", 1)
    return f"GPU{gpu}\t{links}\t{nics}\t{cpus}\t{node}\t\tN/A"


DGX_H100 = "\n".join(
    [
        f"{_HEAD}\tNIC0\tNIC1\tNIC2\tNIC3\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m",
        *map(_nvswitch_row, range(8)),
        "NIC0\tPIX\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\t X \tSYS\tSYS\tSYS\t\t\t\t",
        "NIC1\tSYS\tPIX\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\t X \tSYS\tSYS\t\t\t\t",
        "NIC2\tSYS\tSYS\tPIX\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\t X \tSYS\t\t\t\t",
        "NIC3\tSYS\tSYS\tSYS\tPIX\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\tSYS\t X \t\t\t\t",
        "",
        "Legend:",
        "",
        "  X    = Self",
        "  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)",
        "  NV#  = Connection traversing a bonded set of # NVLinks",
        "",
        "NIC Legend:",
        "",
        "  NIC0: mlx5_0",
        "  NIC1: mlx5_1",
    ]
)
"""Eight H100 that all hang on NVSwitches, four on each socket."""

PAIRS = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNODE\tNV4\tSYS\t0-23\t0
GPU1\tNODE\t X \tSYS\tNV4\t0-23\t0
GPU2\tNV4\tSYS\t X \tNODE\t24-47\t1
GPU3\tSYS\tNV4\tNODE\t X \t24-47\t1

Legend:
  X    = Self
"""
"""Four PCIe cards, 0 and 2 as well as 1 and 3 with an NVLink bridge, across the sockets."""

TWO_SOCKETS_PCIE = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tGPU5\tGPU6\tGPU7\tmlx5_0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tPIX\tPXB\tPXB\tSYS\tSYS\tSYS\tSYS\tPXB\t0-31,64-95\t0
GPU1\tPIX\t X \tPXB\tPXB\tSYS\tSYS\tSYS\tSYS\tPXB\t0-31,64-95\t0
GPU2\tPXB\tPXB\t X \tPIX\tSYS\tSYS\tSYS\tSYS\tPIX\t0-31,64-95\t0
GPU3\tPXB\tPXB\tPIX\t X \tSYS\tSYS\tSYS\tSYS\tPIX\t0-31,64-95\t0
GPU4\tSYS\tSYS\tSYS\tSYS\t X \tPIX\tNODE\tNODE\tSYS\t32-63,96-127\t1
GPU5\tSYS\tSYS\tSYS\tSYS\tPIX\t X \tNODE\tNODE\tSYS\t32-63,96-127\t1
GPU6\tSYS\tSYS\tSYS\tSYS\tNODE\tNODE\t X \tPHB\tSYS\t32-63,96-127\t1
GPU7\tSYS\tSYS\tSYS\tSYS\tNODE\tNODE\tPHB\t X \tSYS\t32-63,96-127\t1
mlx5_0\tPXB\tPXB\tPIX\tPIX\tSYS\tSYS\tSYS\tSYS\t X
"""
"""Eight A100 PCIe without NVLink, four on each socket."""
