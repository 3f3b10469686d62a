"""The PCI side of each GPU, from sysfs: NUMA node, IOMMU, and the ACS of the bridges above it.

``root`` is / or a recorded tree; addresses may be NVML's or sysfs' own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_DEVICES = "sys/bus/pci/devices"

_EXTENDED = 0x100  # configuration space beyond this is readable for root alone
_ACS_ID = 0x000D
# ACS control bits that send peer traffic up to the root: P2P Request Redirect, P2P Completion Redirect (PCIe 6.0,
# section 7.7.11.3).
_REDIRECT = 0x0004 | 0x0008


@dataclass(frozen=True)
class PciBridge:
    """A PCIe bridge above a GPU. ``redirects`` True: its ACS sends peer traffic up to the root complex, so that it
    crosses every switch twice; None: only root may read it."""

    address: str
    redirects: bool | None


def short_address(bus: str) -> str:
    """The address as sysfs has it, with a four-digit domain; NVML writes an eight-digit one: ``00000000:c1:00.0`` ->
    ``0000:c1:00.0``."""
    return bus.lower()[-12:]


def numa_node(bus: str, root: Path = ROOT) -> int | None:
    """The NUMA node of a device; None when the firmware does not say."""
    try:
        node = int((root / _DEVICES / short_address(bus) / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def iommu(buses: Iterable[str], root: Path = ROOT) -> dict[str, str] | None:
    """The IOMMU's domain type by device (identity, DMA, DMA-FQ); empty: no IOMMU at work; None: no sysfs."""
    devices = root / _DEVICES
    if not devices.is_dir():
        return None
    found = {}
    for bus in buses:
        try:
            found[bus] = (devices / short_address(bus) / "iommu_group/type").read_text().strip()
        except OSError:
            continue
    return found


def bridges(buses: Iterable[str], root: Path = ROOT) -> tuple[PciBridge, ...]:
    """The bridges above these devices, each once."""
    found: dict[str, PciBridge] = {}
    for bus in buses:
        device = root / _DEVICES / short_address(bus)
        try:
            path = Path(os.path.realpath(device, strict=True)).parent
        except OSError:
            continue
        while path.name.count(":") == 2:
            if path.name not in found:
                found[path.name] = PciBridge(path.name, _acs_redirects(path / "config"))
            path = path.parent
    return tuple(found.values())


def _acs_redirects(config: Path) -> bool | None:
    try:
        return acs_redirects(config.read_bytes())
    except OSError:
        return None


def acs_redirects(config: bytes) -> bool | None:
    """Whether the ACS capability in a bridge's configuration space redirects peer traffic. None: the space beyond
    its first 256 bytes was not readable."""
    if len(config) <= _EXTENDED:
        return None
    # Extended capabilities are a linked list of headers: 16 bits of id, 4 of version, 12 of the next one's offset
    # (PCIe 6.0, section 7.6.3); of ACS the control word stands at offset 6.
    offset, seen = _EXTENDED, set[int]()
    while offset and offset not in seen and offset + 8 <= len(config):
        seen.add(offset)
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header & 0xFFFF == _ACS_ID:
            return bool(int.from_bytes(config[offset + 6 : offset + 8], "little") & _REDIRECT)
        offset = header >> 20
    return False
