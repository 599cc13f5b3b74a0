"""GPUs as a driver describes them: a stand-in of it answers with NVML's own constants and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pynvml
import pytest

from shared.machine.nvml import read_topology, topology_of


class Card(NamedTuple):
    address: str
    name: str = "NVIDIA A100 80GB PCIe"


class PciInfo(NamedTuple):
    busId: str


class Driver:
    """Four GPUs: 0 and 1 below one switch, 2 and 3 with two NVLinks between them, on two nodes."""

    def __init__(self, *, kinds: int = 1, fails: bool = False) -> None:
        names = ["NVIDIA A100 80GB PCIe", "NVIDIA L40S"]
        self.cards = [Card(f"00000000:{number}1:00.0", names[number % kinds]) for number in range(4)]
        self.fails = fails
        self.ended = False

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(("NVML_", "NVMLError")):
            raise AttributeError(name)
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:
        if self.fails:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    def nvmlShutdown(self) -> None:
        self.ended = True

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        return self.cards[index]

    def nvmlDeviceGetName(self, card: Card) -> str:
        return card.name

    def nvmlDeviceGetUUID(self, card: Card) -> str:
        return f"GPU-{self.cards.index(card)}"

    def nvmlDeviceGetPciInfo(self, card: Card) -> PciInfo:
        return PciInfo(card.address)

    def nvmlDeviceGetP2PStatus(self, one: Card, other: Card, capability: int) -> int:
        assert capability == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        joined = {self.cards.index(one), self.cards.index(other)} == {2, 3}
        return pynvml.NVML_P2P_STATUS_OK if joined else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED

    def nvmlDeviceGetNvLinkState(self, card: Card, link: int) -> int:
        if link >= 3:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return int(link < 2)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, card: Card, link: int) -> PciInfo:
        return PciInfo(self.cards[5 - self.cards.index(card)].address)

    def nvmlDeviceGetTopologyCommonAncestor(self, one: Card, other: Card) -> int:
        pair = {self.cards.index(one), self.cards.index(other)}
        return pynvml.NVML_TOPOLOGY_SINGLE if pair == {0, 1} else pynvml.NVML_TOPOLOGY_SYSTEM


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    for number, node in enumerate((0, 0, 1, -1)):
        folder = tmp_path / "bus/pci/devices" / f"0000:{number}1:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return tmp_path


def test_the_matrix_is_that_of_nvidia_smi(sysfs: Path) -> None:
    driver = Driver()
    found = topology_of(driver, None, ordered_by_bus=False, sysfs=sysfs)
    assert found is not None
    assert found.links == (
        ("X", "PIX", "SYS", "SYS"),
        ("PIX", "X", "SYS", "SYS"),
        ("SYS", "SYS", "X", "NV2"),
        ("SYS", "SYS", "NV2", "X"),
    )
    assert found.nodes == (0, 0, 1, None)
    assert driver.ended


def test_only_what_cuda_sees_is_in_it(sysfs: Path) -> None:
    found = topology_of(Driver(), "3,GPU-2", ordered_by_bus=False, sysfs=sysfs)
    assert found is not None
    assert found.links == (("X", "NV2"), ("NV2", "X"))
    assert found.nodes == (None, 1)
    assert topology_of(Driver(), "MIG-1", ordered_by_bus=False, sysfs=sysfs) is None
    assert topology_of(Driver(), "", ordered_by_bus=False, sysfs=sysfs) is None


def test_gpus_of_several_kinds_are_known_only_in_the_order_of_the_bus(sysfs: Path) -> None:
    assert topology_of(Driver(kinds=2), None, ordered_by_bus=False, sysfs=sysfs) is None
    assert topology_of(Driver(kinds=2), None, ordered_by_bus=True, sysfs=sysfs) is not None


def test_without_a_driver_nothing_is_known(tmp_path: Path) -> None:
    assert read_topology(None, ordered_by_bus=False, driver=tmp_path / "version") is None
    assert topology_of(Driver(fails=True), None, ordered_by_bus=False, sysfs=tmp_path) is None
