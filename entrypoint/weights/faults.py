"""From an operating system error to one line that an operator can act on."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ..errors import Stop, unreadable
from ..units import format_bytes


def owner(path: Path) -> str:
    """``uid 1000, mode 0755, /the/nearest/existing/path``: whose it is, for a message."""
    place = path
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    try:
        status = place.stat()
    except OSError:
        return str(place)
    return f"{place} belongs to uid {status.st_uid}, mode {status.st_mode & 0o7777:04o}"


def nearest(path: Path) -> Path:
    """The path itself, or its nearest parent that this user can see."""
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    return path


def from_os_error(error: OSError, path: Path, setting: str) -> Stop:
    """disk_full, permission_denied (also read-only), else an unreadable file. ``setting`` names the variable
    that chose the place."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error):
        return disk_full(path, setting)
    if error.errno == errno.EROFS:
        return Stop(
            "permission_denied",
            f"{path} is on a read-only file system",
            f"mount it writable, or let {setting} name another place",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return denied(path, setting)
    return unreadable(f"{path}: {error.strerror or type(error).__name__}", f"check {setting}")


def denied(path: Path, setting: str) -> Stop:
    """The running uid, the owner, and the command that hands the place over."""
    uid, gid = os.geteuid(), os.getegid()
    return Stop(
        "permission_denied",
        f"uid {uid} may not use {path}: {owner(path)}",
        f"run `chown -R {uid}:{gid} {nearest(path)}`, start as its owner (--user), or let {setting} name another place",
    )


def disk_full(path: Path, setting: str, need: int | None = None, free: int | None = None) -> Stop:
    place = nearest(path)
    sizes = f": {format_bytes(need)} to write, {format_bytes(free or 0)} free" if need is not None else ""
    return Stop(
        "disk_full",
        f"no space left on the disk of {place}{sizes}",
        f"free space there, or let {setting} name a bigger disk",
    )
