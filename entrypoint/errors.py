"""The one way in which relaunch refuses to go on: a cause, one clear line, the next step, an exit code."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from .units import format_bytes

# sysexits by cause (docs/operations.md, "Exit codes"). Every cause that is not here and stops for
# configuration exits 78; every cause whose restart budget is used up exits 70.
EXIT_OK = 0
EXIT_USAGE = 64
EXIT_UNREADABLE = 66
EXIT_UNAVAILABLE = 69
EXIT_GAVE_UP = 70
EXIT_STATE_IN_USE = 73
EXIT_CONFIG = 78

EXIT_BY_CAUSE = {
    "weights_corrupt": 65,
    "weights_missing": 66,
    "hub_unavailable": 69,
    "download_stalled": 69,
    "gpu_lost": 69,
    "driver_mismatch": 69,
    "image_mismatch": 69,
    "jit_toolchain": 69,
    "shm_too_small": 69,
    "port_in_use": 69,
    "disk_full": 73,
    "permission_denied": 73,
    "hub_rate_limited": 75,
    "hub_gated": 77,
}


class Stop(Exception):
    """Raised when relaunch cannot go on.

    ``cause`` is a name of the failure catalogue; ``message`` says in one line what is wrong and where it
    came from; ``next_step`` says what the operator can do. ``exit_code`` follows from the cause.
    """

    def __init__(self, cause: str, message: str, next_step: str = "", *, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.cause = cause
        self.message = message
        self.next_step = next_step
        self.exit_code = exit_code if exit_code is not None else EXIT_BY_CAUSE.get(cause, EXIT_CONFIG)

    def line(self) -> str:
        """Return the whole refusal as one line."""
        text = f"{self.message}; {self.next_step}" if self.next_step else self.message
        return " ".join(text.split())


def config_rejected(message: str, next_step: str = "") -> Stop:
    """Return the Stop for a setting, flag or combination that cannot work (exit 78)."""
    return Stop("config_rejected", message, next_step)


def unreadable(message: str, next_step: str = "") -> Stop:
    """Return the Stop for an input file that is absent or cannot be parsed (exit 66)."""
    return Stop("weights_missing", message, next_step, exit_code=EXIT_UNREADABLE)


# -- operating system errors --------------------------------------------------------------------------------


def refused(error: OSError, places: Mapping[str, str | os.PathLike[str]]) -> Stop:
    """Return the Stop for what the operating system refused, with the setting that chose the path. ``places``: path by
    the variable that names it; the longest one that the refused path lies in counts. Without a path in it the error
    says no more than its own text."""
    path = os.path.abspath(os.fsdecode(error.filename)) if isinstance(error.filename, (str, bytes)) else ""
    above = {name: os.path.abspath(place) for name, place in places.items() if path}
    near = [name for name, place in above.items() if path == place or path.startswith(place.rstrip("/") + "/")]
    setting = max(near, key=lambda name: len(above[name]), default="")
    what = f"{setting}={above[setting]}: " if setting else ""
    inside = path if not setting or path != above[setting] else "it"
    what += f"{inside or 'a file'} cannot be used by uid {os.getuid()}: {error.strerror or error}"
    elsewhere = f", or set {setting}" if setting else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Stop("disk_full", what, f"free space there{elsewhere}")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return Stop("permission_denied", what, f"give this user the right to it (chown, chmod){elsewhere}")
    return unreadable(what, f"check it{elsewhere}")


def from_os_error(error: OSError, path: Path, setting: str) -> Stop:
    """Return the Stop for an error at ``path``: disk_full or permission_denied (exit 73), else an unreadable file
    (66). ``setting`` is the variable that chose the place."""
    return _about_the_place(error, path, setting) or unreadable(
        f"{path}: {error.strerror or type(error).__name__}", f"check {setting}"
    )


def unwritable(setting: str, directory: Path, error: OSError) -> Stop:
    """Return the Stop for a directory of relaunch's own that cannot be written (exit 73), whatever the reason."""
    path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else directory
    return _about_the_place(error, path, setting) or Stop(
        "permission_denied", f"{setting}={directory} cannot be written: {error.strerror or error}", f"set {setting}"
    )


def _about_the_place(error: OSError, path: Path, setting: str) -> Stop | None:
    """The errors that say something about the disk or the owner of ``path``."""
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
    return None


def denied(path: Path, setting: str) -> Stop:
    """Return the Stop that names the running uid, the owner of ``path`` and the command that hands it over."""
    uid, gid = os.geteuid(), os.getegid()
    place = nearest(path)
    try:
        status = place.stat()
        owner = f"{place} belongs to uid {status.st_uid}, mode {status.st_mode & 0o7777:04o}"
    except OSError:
        owner = str(place)
    return Stop(
        "permission_denied",
        f"uid {uid} may not use {path}: {owner}",
        f"run `chown -R {uid}:{gid} {place}`, start as its owner (--user), or let {setting} name another place",
    )


def disk_full(path: Path, setting: str, need: int | None = None, free: int | None = None) -> Stop:
    """Return the Stop for a full disk. ``need`` and ``free`` are bytes, where they are known."""
    sizes = f": {format_bytes(need)} to write, {format_bytes(free or 0)} free" if need is not None else ""
    return Stop(
        "disk_full",
        f"no space left on the disk of {nearest(path)}{sizes}",
        f"free space there, or let {setting} name a bigger disk",
    )


def nearest(path: Path) -> Path:
    """Return ``path`` itself, or its nearest parent that exists."""
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    return path
