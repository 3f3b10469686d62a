"""The one way in which relaunch refuses to go on: a cause, one clear line, the next step, an exit code."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping

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
        """The whole refusal as one line."""
        text = f"{self.message}; {self.next_step}" if self.next_step else self.message
        return " ".join(text.split())


def config_rejected(message: str, next_step: str = "") -> Stop:
    """A setting, flag or combination that cannot work (exit 78)."""
    return Stop("config_rejected", message, next_step)


def unreadable(message: str, next_step: str = "") -> Stop:
    """An input file that is absent or cannot be parsed (exit 66)."""
    return Stop("weights_missing", message, next_step, exit_code=EXIT_UNREADABLE)


def refused(error: OSError, places: Mapping[str, str | os.PathLike[str]]) -> Stop:
    """What the operating system refused, with the setting that chose the path. ``places``: path by the variable that
    names it; the longest one that the refused path lies in counts. Without a path in it the error says no more than
    its own text."""
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


def unwritable(setting: str, directory: object, error: OSError) -> Stop:
    """A directory of ours that cannot be written (exit 73): why, and what mends exactly that. ``setting`` is the
    variable that moves it."""
    what = f"{setting}={directory} cannot be written by uid {os.getuid()}: {error.strerror or error}"
    if error.filename and str(error.filename) != str(directory):
        what += f" ({error.filename})"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Stop("disk_full", what, f"free space there, or set {setting}")
    if error.errno == errno.EROFS:
        return Stop("permission_denied", what, f"mount a writable volume there, or set {setting}")
    return Stop("permission_denied", what, f"chown -R {os.getuid()}:{os.getgid()} it on the host, or set {setting}")
