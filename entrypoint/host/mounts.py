"""Mounted file systems, from /proc/self/mountinfo: which kind lies at a path, its options, and is it a network's."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")
UNKNOWN = "unknown"

# One server, or a host outside this virtual machine; and file systems spread over many servers. Every other FUSE
# file system counts as a network's too (s3fs, gcsfuse, juicefs, sshfs, rclone ...), but those of `_LOCAL_FUSE`.
_SERVER = frozenset({"9p", "afs", "cifs", "nfs", "nfs4", "smb3", "smbfs", "vastnfs", "virtiofs"})
_PARALLEL = frozenset({"beegfs", "ceph", "glusterfs", "gpfs", "lustre", "orangefs", "panfs", "wekafs"})
NETWORK = _SERVER | _PARALLEL
_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs"})


@dataclass(frozen=True)
class Mount:
    """One mount. ``options`` are the mount's own, with ``ro`` also when only the file system beneath is read-only."""

    point: str
    file_system: str
    options: tuple[str, ...]


def parse(mountinfo: str) -> list[Mount]:
    """The mounts of a mountinfo text (proc_pid_mountinfo(5)), in mount order; malformed lines are left out."""
    found = []
    for line in mountinfo.splitlines():
        left, separator, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if not separator or len(fields) < 6 or not tail:
            continue
        beneath = tail[2].split(",") if len(tail) > 2 else []
        options = (*fields[5].split(","), *(("ro",) if "ro" in beneath else ()))
        found.append(Mount(_unescape(fields[4]), tail[0], options))
    return found


def read(mountinfo: Path = MOUNTINFO) -> list[Mount]:
    """The mounts that this process sees; empty when they cannot be read."""
    try:
        return parse(mountinfo.read_text(encoding="utf-8", errors="surrogateescape"))
    except OSError:
        return []


def find(path: Path | str, mounts: Iterable[Mount]) -> Mount | None:
    """The mount that ``path`` (absolute, without links) lies on: the longest mount point above it, and of equal ones
    the last, which is on top."""
    text = str(path)
    best: Mount | None = None
    for mount in mounts:
        inside = text == mount.point or text.startswith(mount.point.rstrip("/") + "/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def file_system(path: Path) -> str:
    """The type of the file system that ``path`` lies on (``ext4``, ``nfs4``, ``overlay``), or ``unknown``."""
    try:
        mount = find(os.path.realpath(path), read())
    except OSError:
        return UNKNOWN
    return mount.file_system if mount else UNKNOWN


def is_network(kind: str) -> bool:
    """True for a file system type whose data is read over a network."""
    return kind in NETWORK or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE)


def on_network(path: Path) -> bool:
    """True when ``path`` lies on a network file system."""
    return is_network(file_system(path))


def _unescape(text: str) -> str:
    r"""The kernel writes space, tab, line end and backslash as three octal digits (``\040``)."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
