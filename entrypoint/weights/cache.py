"""The hub cache on disk, without the hub client: its layout, its locks, unfinished files, removing a bad file.

Also for a cache that is read-only, or that lacks ``trees/`` and ``refs/``.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..errors import nearest
from ..host import mounts
from . import manifest
from .manifest import Manifest

COMMIT = re.compile(r"[0-9a-f]{40}")
# On a network file system a lock of another host may be invisible; only an old file is surely an orphan there.
OLD_SECONDS = 6 * 3600.0
# A snapshot's file links to its blob, and that perhaps into the store that repositories share.
MAX_LINKS = 8


# -- layout ---------------------------------------------------------------------------------------------------


def commit_of(storage: Path, revision: str) -> str | None:
    """Return the commit that the cache remembers for a branch or tag; a commit names itself."""
    if COMMIT.fullmatch(revision):
        return revision
    if not manifest.is_safe_path(revision):
        return None
    try:
        text = (storage / "refs" / revision).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return text if COMMIT.fullmatch(text) else None


def only_snapshot(storage: Path) -> str | None:
    """Return the commit of the one snapshot that is there; None when there are none or several."""
    try:
        commits = [path.name for path in (storage / "snapshots").iterdir() if COMMIT.fullmatch(path.name)]
    except OSError:
        return None
    return commits[0] if len(commits) == 1 else None


def snapshot(storage: Path, commit: str) -> Path:
    """Return the directory of one commit's files."""
    return storage / "snapshots" / commit


def tree(storage: Path, commit: str) -> Manifest | None:
    """Return the listing that the hub client keeps. It writes it with mode 0600, so another user cannot read it."""
    try:
        document = json.loads((storage / "trees" / f"{commit}.json").read_bytes())
        if document.get("format_version") != 1:
            return None
        return manifest.parse(document, "the cache's own listing")[1]
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def link_chain(path: Path) -> list[Path]:
    """Return every link from a snapshot's file to its bytes, the bytes first: removing them in this order leaves
    nothing that the client could link again."""
    return [hop for hop in reversed(_hops(path)) if os.path.lexists(hop)]


def link_target(path: Path) -> Path:
    """Return where ``path`` leads after all its links, whether there is something or not."""
    return _hops(path)[-1]


def _hops(path: Path) -> list[Path]:
    hops = [path]
    while hops[-1].is_symlink() and len(hops) <= MAX_LINKS:
        hops.append(Path(os.path.normpath(hops[-1].parent / hops[-1].readlink())))
    return hops


def blob_name(path: Path) -> str | None:
    """Return the name of the blob that a snapshot's file links to, which is its digest."""
    return path.readlink().name if path.is_symlink() else None


def free_bytes(path: Path) -> int:
    """Return the bytes that this user may write on the disk of ``path`` (which need not exist)."""
    status = os.statvfs(nearest(path))
    return status.f_bavail * status.f_frsize


# -- locks ----------------------------------------------------------------------------------------------------


def lock_path(cache: Path, storage: Path, etag: str) -> Path:
    """Return where the hub client locks the blob ``etag``."""
    return cache / ".locks" / storage.name / f"{etag}.lock"


@contextmanager
def locked(path: Path, timeout: float) -> Iterator[bool]:
    """Hold the client's lock on one blob. Yields False when another process kept it for ``timeout`` seconds, and
    True also where no lock can be had (a read-only cache, a file system without locks)."""
    import filelock  # takes a tenth of a second, and is seldom needed

    lock = filelock.FileLock(path, mode=0o666)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=timeout, poll_interval=0.05)
    except filelock.Timeout:
        yield False
        return
    except (OSError, NotImplementedError):
        pass
    try:
        yield True
    finally:
        lock.release()


def locks_supported(cache: Path) -> bool:
    """Return False when the file system refuses flock (some Lustre mounts): then one worker, and no orphan test."""
    probe = cache / ".locks" / ".relaunch-probe"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        with probe.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EAGAIN, errno.EACCES, errno.EROFS, errno.EPERM)
    probe.unlink(missing_ok=True)
    return True


def lock_holder(cache: Path, storage: Path) -> tuple[Path, int] | None:
    """Return a lock of this repository that some process holds, and its pid, from /proc/locks."""
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
            if inode in by_inode:
                return by_inode[inode], pid
    return None


# -- unfinished and bad files ---------------------------------------------------------------------------------


def remove_orphans(cache: Path, storage: Path, now: float) -> tuple[int, int]:
    """Remove ``blobs/*.incomplete`` that no process works on, and return (files, bytes). The client never resumes
    them. ``now`` in seconds since the epoch."""
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


def unfinished_activity(storage: Path) -> tuple[int, int]:
    """Return (bytes on disk, newest change in ns) of unfinished files: it moves while anybody downloads."""
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


def remove(hops: Sequence[Path]) -> None:
    """Remove a file along its `link_chain`. Raises OSError, whose ``filename`` says where."""
    for hop in hops:
        hop.unlink(missing_ok=True)
