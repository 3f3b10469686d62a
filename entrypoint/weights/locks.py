"""The hub client's file locks: who holds one, which unfinished files nobody works on any more."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..host import mounts

# On a network file system a lock of another host may be invisible; only an old file is surely an orphan there.
OLD_SECONDS = 6 * 3600.0


def lock_path(cache: Path, storage: Path, etag: str) -> Path:
    return cache / ".locks" / storage.name / f"{etag}.lock"


@contextmanager
def held(path: Path, timeout: float) -> Iterator[bool]:
    """Hold the client's lock on one blob. Yields False when another process kept it for ``timeout`` seconds, and
    True also where locks do not exist."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        yield True
        return
    try:
        deadline, got = time.monotonic() + timeout, False
        while not got:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                got = True
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    break
                if time.monotonic() >= deadline:
                    yield False
                    return
                time.sleep(0.05)
        yield True
    finally:
        os.close(handle)


def supported(cache: Path) -> bool:
    """False when the file system refuses flock (some Lustre mounts): then one worker and no lock test."""
    probe = cache / ".locks" / ".relaunch-probe"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        with probe.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EAGAIN, errno.EACCES, errno.EROFS, errno.EPERM)
    probe.unlink(missing_ok=True)
    return True


def remove_orphans(cache: Path, storage: Path, now: float) -> tuple[int, int]:
    """Remove ``blobs/*.incomplete`` that no process works on: (files, bytes). The client never resumes them."""
    files = freed = 0
    remote = mounts.on_network(cache)
    for path in sorted((storage / "blobs").glob("*.incomplete")):
        etag = path.name.split(".", 1)[0]
        try:
            status = path.lstat()
            if remote and now - status.st_mtime < OLD_SECONDS:
                continue
            lock = lock_path(cache, storage, etag)
            if not lock.exists():
                # The client makes the lock before the file, so there is no writer.
                path.unlink()
            else:
                with lock.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
        except OSError:
            continue
        files, freed = files + 1, freed + status.st_blocks * 512
    return files, freed


def activity(storage: Path) -> tuple[int, int]:
    """(bytes on disk, newest change in ns) of unfinished files: it moves while anybody downloads."""
    size = newest = 0
    try:
        entries = list(os.scandir(storage / "blobs"))
    except OSError:
        return 0, 0
    for entry in entries:
        if entry.name.endswith(".incomplete"):
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            size += status.st_blocks * 512
            newest = max(newest, status.st_mtime_ns)
    return size, newest


def holder(cache: Path, storage: Path, ours: set[int]) -> tuple[Path, int] | None:
    """A lock of this repository that a process other than ``ours`` holds, and its pid, from /proc/locks."""
    by_inode: dict[int, Path] = {}
    for path in (cache / ".locks" / storage.name).glob("*.lock"):
        try:
            by_inode[path.stat().st_ino] = path
        except OSError:
            continue
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        fields = line.split()
        if len(fields) >= 6 and fields[1] == "FLOCK":
            inode, pid = int(fields[5].split(":")[-1]), int(fields[4])
            if inode in by_inode and pid not in ours:
                return by_inode[inode], pid
    return None
