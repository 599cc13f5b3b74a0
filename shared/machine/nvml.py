"""The GPUs of this machine as NVIDIA's driver describes them (NVML). Nothing is imported where there is no driver.

https://docs.nvidia.com/deploy/nvml-api/
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared.machine.gpu_topology import SELF, GpuTopology, visible_gpus
from shared.machine.numa import SYSFS

DRIVER = Path("/proc/driver/nvidia/version")
"""There where the driver is loaded."""


def read_topology(
    visible: str | None, *, ordered_by_bus: bool, driver: Path = DRIVER, sysfs: Path = SYSFS
) -> GpuTopology | None:
    """How the GPUs that CUDA sees are joined, in its order. None without a driver or the package `nvidia-ml-py`, where
    the driver does not say, and where CUDA's order is not known. `visible`: CUDA_VISIBLE_DEVICES; `ordered_by_bus`:
    whether CUDA_DEVICE_ORDER is PCI_BUS_ID. Without that CUDA puts the fastest first: only GPUs of one kind are in
    NVML's order then.
    """
    if not driver.exists():
        return None
    try:
        import pynvml
    except ImportError:
        return None
    return topology_of(pynvml, visible, ordered_by_bus=ordered_by_bus, sysfs=sysfs)


def topology_of(nvml: Any, visible: str | None, *, ordered_by_bus: bool, sysfs: Path = SYSFS) -> GpuTopology | None:
    """As `read_topology`, by `nvml`: the module pynvml, or what answers as it does."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        names = tuple(str(nvml.nvmlDeviceGetName(gpu)) for gpu in gpus)
        seen = visible_gpus(visible, [str(nvml.nvmlDeviceGetUUID(gpu)) for gpu in gpus])
        if not seen or (len(set(names)) > 1 and not ordered_by_bus):
            return None
        links = tuple(tuple(_link(nvml, one, other) for other in gpus) for one in gpus)
        return GpuTopology(links, tuple(_node(nvml, gpu, sysfs) for gpu in gpus), names).only(seen)
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _link(nvml: Any, one: Any, other: Any) -> str:
    """As `nvidia-smi topo -m` writes it. Raises NVMLError."""
    if one is other:
        return SELF
    if (number := _nvlinks(nvml, one, other)) > 0:
        return f"NV{number}"
    words = {
        nvml.NVML_TOPOLOGY_INTERNAL: "PIX",  # two GPUs of one board
        nvml.NVML_TOPOLOGY_SINGLE: "PIX",
        nvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
        nvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
        nvml.NVML_TOPOLOGY_NODE: "NODE",
    }
    return words.get(nvml.nvmlDeviceGetTopologyCommonAncestor(one, other), "SYS")


def _nvlinks(nvml: Any, one: Any, other: Any) -> int:
    """How many NVLinks of one GPU lead to another, or to switches that the other hangs on, too; 0 where none does."""
    try:
        if nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) != nvml.NVML_P2P_STATUS_OK:
            return 0
    except nvml.NVMLError:
        return 0
    address = nvml.nvmlDeviceGetPciInfo(other).busId
    direct = switched = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(one, link):
                continue
            if nvml.nvmlDeviceGetNvLinkRemotePciInfo(one, link).busId == address:
                direct += 1
            else:
                switched += 1
        except nvml.NVMLError:  # it has no more
            break
    return max(1, direct or switched)


def _node(nvml: Any, gpu: Any, sysfs: Path) -> int | None:
    """NVML numbers NUMA nodes only where GPUs are nodes themselves; the kernel says where each device hangs. Raises
    NVMLError."""
    address = nvml.nvmlDeviceGetPciInfo(gpu).busId
    text = address.decode() if isinstance(address, bytes) else str(address)
    domain, _, rest = text.lower().partition(":")
    try:
        node = int((sysfs / "bus" / "pci" / "devices" / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
