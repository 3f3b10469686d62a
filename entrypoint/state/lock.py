"""The lock that keeps a state directory to one supervisor."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TextIO

from ..errors import EXIT_STATE_IN_USE, Stop, unwritable
from ..json_store import open_regular


class Lock:
    """One supervisor per state directory. The file holds the owner's pid; the kernel drops the lock with it."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / "lock"
        self._file: TextIO | None = None

    def acquire(self) -> None:
        """Raise Stop (73) when another supervisor has it, or when the directory cannot be written."""
        directory = self._path.parent
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # Opening must not empty the file that another supervisor's pid stands in.
            descriptor = open_regular(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            self._file = open(descriptor, "r+", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise unwritable("RELAUNCH_STATE_DIR", directory, error) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = self.owner(directory)
            self._file.close()
            raise Stop(
                "config_rejected",
                f"RELAUNCH_STATE_DIR={directory} is in use by another supervisor (pid {pid or 'unknown'})",
                "stop that one, or give this one its own RELAUNCH_STATE_DIR and ports",
                exit_code=EXIT_STATE_IN_USE,
            ) from None
        try:
            self._file.truncate(0)
            self._file.write(f"{os.getpid()}\n")
            self._file.flush()
        except OSError as error:
            raise Stop(
                "disk_full", f"RELAUNCH_STATE_DIR={directory} cannot be written: {error.strerror}", "make room there"
            ) from None

    def release(self) -> None:
        """Let another supervisor have the directory. Does nothing when the lock is not held."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @staticmethod
    def owner(state_dir: Path) -> int | None:
        """Pid of the supervisor that holds ``state_dir``, or None when nobody does."""
        try:
            with open(open_regular(state_dir / "lock", os.O_RDONLY), encoding="utf-8") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except OSError:
                    return int(file.read().strip() or 0) or None
        except (OSError, ValueError):
            pass
        return None
