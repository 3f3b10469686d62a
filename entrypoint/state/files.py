"""Atomic JSON files and the lock that keeps a state directory to one supervisor."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from ..errors import EXIT_STATE_IN_USE, Stop, unwritable

SCHEMA = 1


def utc(timestamp: float) -> str:
    """RFC 3339 UTC with milliseconds."""
    return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write ``document`` with `"schema": 1`, whole or not at all, surviving a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # Logs and settings of a server: for its own user.
        with open(temporary, "w", encoding="utf-8", opener=_private) as file:
            json.dump({"schema": SCHEMA, **document}, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def read_json(path: Path) -> dict[str, Any] | None:
    """The document, or None when it is absent, damaged or of another schema: state is a help, never a must."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and document.get("schema") == SCHEMA else None


def keep_newest(folder: Path, pattern: str, count: int) -> None:
    """Remove all but the ``count`` newest (by name) files that match."""
    for path in sorted(folder.glob(pattern), key=lambda p: p.name)[:-count]:
        with contextlib.suppress(OSError):
            path.unlink()


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
            # a+: opening must not empty the file that another supervisor's pid stands in.
            self._file = open(self._path, "a+", encoding="utf-8")  # noqa: SIM115
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
        if self._file is not None:
            self._file.close()
            self._file = None

    @staticmethod
    def owner(state_dir: Path) -> int | None:
        """Pid of the supervisor that holds ``state_dir``, or None when nobody does."""
        try:
            with open(state_dir / "lock", encoding="utf-8") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except OSError:
                    return int(file.read().strip() or 0) or None
        except (OSError, ValueError):
            pass
        return None
