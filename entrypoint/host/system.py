"""Settings of the operating system: CPUs and NUMA, the driver's kernel modules, the clock.

``root`` is / or a recorded tree.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

ROOT = Path("/")
# STA_UNSYNC of adjtimex(2), and where struct timex keeps its status on 64-bit Linux: behind modes (int, padded) and
# four longs. The struct has 208 bytes.
_UNSYNCHRONISED = 0x40
_STATUS = slice(40, 44)
_TIMEX_BYTES = 256
_DAY = 86400.0


def numa_nodes_allowed(root: Path = ROOT) -> tuple[int, ...] | None:
    """NUMA nodes with a CPU that this process may use. None: not readable."""
    base = root / "sys/devices/system/node"
    if not base.is_dir():
        return None
    allowed = os.sched_getaffinity(0)
    folders = base.glob("node[0-9]*")
    return tuple(sorted(int(folder.name[4:]) for folder in folders if allowed & _cpus(_text(folder / "cpulist"))))


def numa_balancing(root: Path = ROOT) -> bool | None:
    """True when the kernel moves pages between NUMA nodes by itself. None: not readable."""
    word = _text(root / "proc/sys/kernel/numa_balancing")
    return None if word is None else word.strip() != "0"


def open_kernel_modules(root: Path = ROOT) -> bool | None:
    """True for NVIDIA's open kernel modules, False for the proprietary ones. None: no driver is loaded."""
    text = _text(root / "proc/driver/nvidia/version")
    return None if text is None else "Open Kernel Module" in text


def clock_synchronised() -> bool | None:
    """True when something keeps the clock right: the kernel's own flag, as adjtimex(2) reports it without changing
    anything. None: the kernel does not say."""
    try:
        timex = ctypes.create_string_buffer(_TIMEX_BYTES)  # modes 0: only read
        if ctypes.CDLL(None, use_errno=True).adjtimex(timex) < 0:
            return None
    except (OSError, AttributeError):
        return None
    return not int.from_bytes(timex.raw[_STATUS], "little") & _UNSYNCHRONISED


def clock_behind(now: float | None = None) -> bool:
    """True when the clock (``now``: Unix seconds) stands more than a day before this program's files were made."""
    return (time.time() if now is None else now) < Path(__file__).stat().st_mtime - _DAY


def _cpus(text: str | None) -> set[int]:
    """The CPUs of a list such as ``0-3,8``."""
    cpus: set[int] = set()
    for part in filter(None, (text or "").strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
