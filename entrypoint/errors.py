"""The one way in which relaunch refuses to go on: a cause, one clear line, the next step, an exit code."""

from __future__ import annotations

import errno
import os

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
