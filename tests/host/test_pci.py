"""What sysfs says of the way to a GPU: bridges with ACS, IOMMU, NUMA node."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded import tree

from entrypoint.host import pci
from entrypoint.host.pci import PciBridge


def acs(control: int, *, at: int = 0x148) -> bytes:
    """Configuration space of a bridge: an AER capability, then ACS at ``at`` with this control word."""
    data = bytearray(4096)
    data[0x100:0x104] = (0x0001 | 2 << 16 | at << 20).to_bytes(4, "little")
    data[at : at + 4] = (0x000D | 1 << 16).to_bytes(4, "little")
    data[at + 6 : at + 8] = control.to_bytes(2, "little")
    return bytes(data)


@pytest.mark.parametrize(
    ("config", "expected"),
    [(acs(0x001D), True), (acs(0x0011), False), (acs(0), False), (bytes(4096), False), (acs(0x1D)[:64], None)],
)
def test_acs_bits(config: bytes, expected: bool | None) -> None:
    assert pci.acs_redirects(config) is expected


def test_bridges_and_iommu_of_a_gpu(tmp_path: Path) -> None:
    real = "sys/devices/pci0000:00/0000:00:01.1/0000:c0:00.0/0000:c1:00.0"
    root = tree(
        tmp_path,
        {
            f"{real}/config": b"",
            "sys/devices/pci0000:00/0000:00:01.1/config": acs(0x1D),
            "sys/devices/pci0000:00/0000:00:01.1/0000:c0:00.0/config": acs(0)[:64],
            f"{real}/iommu_group/type": "DMA-FQ\n",
        },
    )
    (root / "sys/bus/pci/devices").mkdir(parents=True)
    (root / "sys/bus/pci/devices/0000:c1:00.0").symlink_to(root / real)
    assert pci.bridges(["00000000:C1:00.0"], root) == (PciBridge("0000:c0:00.0", None), PciBridge("0000:00:01.1", True))
    assert pci.iommu(["00000000:C1:00.0"], root) == {"00000000:C1:00.0": "DMA-FQ"}
    assert pci.iommu([], tmp_path / "nowhere") is None


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), ("", None)])
def test_the_numa_node_of_a_device(text: str, node: int | None, tmp_path: Path) -> None:
    root = tree(tmp_path, {"sys/bus/pci/devices/0000:c1:00.0/numa_node": text})
    assert pci.numa_node("00000000:C1:00.0", root) == node
    assert pci.numa_node("00000000:C2:00.0", root) is None
