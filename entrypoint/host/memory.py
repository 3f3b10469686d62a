"""Host memory in bytes: all of it, what could be had now, and the limits that our control groups set.

``root`` is / or a recorded tree. Control groups of versions 1 and 2 are read, also both at once (hybrid).
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

import psutil

ROOT = Path("/")
SHARED_MEMORY = Path("/dev/shm")
# Version 1 writes "no limit" as the largest page-aligned 63-bit number.
_NO_LIMIT = 1 << 60


def total_bytes() -> int:
    """The memory of the machine, whatever a control group allows of it."""
    return int(psutil.virtual_memory().total)


def available_bytes() -> int:
    """What a new process could take without swapping (MemAvailable), never above our control groups' limit."""
    available = int(psutil.virtual_memory().available)
    return min(available, cgroup_limit() or available)


def cgroup_limit(root: Path = ROOT) -> int | None:
    """The smallest memory limit on the way up from our control group; None: no limit."""
    words = (_text(file).strip() for file in cgroup_files("memory.max", "memory.limit_in_bytes", root))
    return min((int(word) for word in words if word.isdecimal() and int(word) < _NO_LIMIT), default=None)


def cgroup_files(version2: str, version1: str, root: Path = ROOT) -> list[Path]:
    """The control files of that name that exist for our memory control group and each one above it, innermost first."""
    base = root / "sys/fs/cgroup"
    found: list[Path] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            found += _up(base, path, version2) + _up(base / "unified", path, version2)
        elif "memory" in controllers.split(","):
            found += _up(base / "memory", path, version1)
    return found


def _up(base: Path, path: str, name: str) -> list[Path]:
    """Inside a container ``path`` is the host's and may not exist: the mount's top is then our own cgroup."""
    folder = base / path.lstrip("/")
    folders = [folder, *(parent for parent in folder.parents if parent == base or base in parent.parents)]
    return [file for place in folders if (file := place / name).is_file()]


def shared_memory_bytes(path: Path = SHARED_MEMORY) -> int | None:
    """Size of the file system of POSIX shared memory; None when there is none."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def lockable_bytes() -> int | None:
    """How much a process may lock (hard RLIMIT_MEMLOCK); None: unlimited."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    return None if limit == resource.RLIM_INFINITY else limit


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
