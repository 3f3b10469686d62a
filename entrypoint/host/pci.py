"""IOMMU and ACS of the way to each GPU, from sysfs. ``root`` is / or a recorded tree."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from .facts import Bridge

_EXTENDED = 0x100  # configuration space beyond this is readable for root alone
_ACS_ID = 0x000D
# ACS control bits that send peer traffic up to the root: P2P Request Redirect, P2P Completion Redirect (PCIe 6.0,
# section 7.7.11.3).
_REDIRECT = 0x0004 | 0x0008


def short_address(bus: str) -> str:
    """NVML writes an eight-digit domain, sysfs a four-digit one: ``00000000:c1:00.0`` -> ``0000:c1:00.0``."""
    return bus.lower()[-12:]


def iommu(buses: Iterable[str], root: Path = Path("/")) -> dict[str, str] | None:
    """Domain type by GPU (identity, DMA, DMA-FQ); empty: no IOMMU at work; None: no sysfs."""
    devices = root / "sys/bus/pci/devices"
    if not devices.is_dir():
        return None
    found = {}
    for bus in buses:
        try:
            found[bus] = (devices / short_address(bus) / "iommu_group/type").read_text().strip()
        except OSError:
            continue
    return found


def bridges(buses: Iterable[str], root: Path = Path("/")) -> tuple[Bridge, ...]:
    """The bridges above these GPUs, each once."""
    found: dict[str, Bridge] = {}
    for bus in buses:
        device = root / "sys/bus/pci/devices" / short_address(bus)
        try:
            path = Path(os.path.realpath(device, strict=True)).parent
        except OSError:
            continue
        while path.name.count(":") == 2:
            if path.name not in found:
                found[path.name] = Bridge(path.name, _redirects(path / "config"))
            path = path.parent
    return tuple(found.values())


def _redirects(config: Path) -> bool | None:
    try:
        data = config.read_bytes()
    except OSError:
        return None
    return redirects(data)


def redirects(config: bytes) -> bool | None:
    """Does this bridge's ACS redirect peer traffic? None: its extended space was not readable."""
    if len(config) <= _EXTENDED:
        return None
    offset, seen = _EXTENDED, set[int]()
    while offset and offset not in seen and offset + 8 <= len(config):
        seen.add(offset)
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header & 0xFFFF == _ACS_ID:
            return bool(int.from_bytes(config[offset + 6 : offset + 8], "little") & _REDIRECT)
        offset = header >> 20
    return False
