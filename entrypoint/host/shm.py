"""Shared-memory files that the engine's processes had open: noted while they live, removed after.

sglang and joblib leave files in /dev/shm even after a clean drain, some without a pid in their name, so a
name alone never tells whose they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from .memory import SHARED_MEMORY


class ShmLedger:
    """The files of /dev/shm that belong to our process tree, each by name and inode."""

    def __init__(self, root: Path = SHARED_MEMORY, record: Path | None = None) -> None:
        """``record``: where the claims are kept, so that they outlive a killed supervisor."""
        self._root = root
        self._record = record
        self._before = self._listing()
        self._ours: set[tuple[str, int]] = set()

    def note(self, pids: Iterable[int]) -> None:
        """Look at files that are new since the last look; claim those that a process of ``pids`` has open or
        mapped. Costs one directory listing when nothing is new."""
        fresh = self._listing() - self._before - self._ours
        if not fresh:
            return
        inodes: set[int] = set()
        for pid in pids:
            inodes |= _open_inodes(pid, str(self._root))
        claimed = {(name, inode) for name, inode in fresh if inode in inodes}
        if claimed:
            self._ours |= claimed
            self._save()

    def remove(self, ever: Collection[int] = ()) -> list[str]:
        """Remove what is ours and still the same file. Call it when the tree is gone. ``ever``: the pids that it had;
        a file that is newer than the tree and carries one of them (`sem.loky-<pid>-...`) was made by it, though it
        died before anybody looked."""
        removed = []
        listing = self._listing()
        named = {(name, inode) for name, inode in listing - self._before if _pid_in(name) in ever}
        for name, _ in sorted((self._ours | named) & listing):
            try:
                (self._root / name).unlink()
                removed.append(name)
            except OSError:
                continue
        self._ours.clear()
        if self._record is not None:
            self._record.unlink(missing_ok=True)
        return removed

    def _save(self) -> None:
        if self._record is not None:
            with contextlib.suppress(OSError):
                self._record.write_text(json.dumps(sorted(self._ours)), encoding="utf-8")

    @classmethod
    def of_record(cls, record: Path, root: Path = SHARED_MEMORY) -> ShmLedger:
        """The ledger that an earlier supervisor kept; empty when there is none."""
        ledger = cls(root, record)
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            ledger._ours = {(str(name), int(inode)) for name, inode in json.loads(record.read_text(encoding="utf-8"))}
        return ledger

    def _listing(self) -> set[tuple[str, int]]:
        try:
            with os.scandir(self._root) as entries:
                return {(entry.name, entry.inode()) for entry in entries if entry.is_file(follow_symlinks=False)}
        except OSError:
            return set()


def _pid_in(name: str) -> int | None:
    match = re.search(r"-(\d+)-", name)
    return int(match[1]) if match else None


def _open_inodes(pid: int, root: str) -> set[int]:
    """Inodes below ``root`` that a process maps or holds open. By inode, because a named semaphore is mapped
    under a temporary name that is gone by now."""
    found: set[int] = set()
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                if root in line:
                    found.add(int(line.split(maxsplit=5)[4]))
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{descriptor}"
            if os.readlink(path).startswith(root):
                found.add(os.stat(path).st_ino)
    except (OSError, ValueError, IndexError):
        pass  # the process went away, or is not ours to look at
    return found
