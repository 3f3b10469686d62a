"""Hash every byte, one file per thread, as many threads as cores."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

BUFFER = 1 << 18  # stays in the second-level cache between reading and hashing

Identity = tuple[int, int, int, int]


@dataclass(frozen=True)
class HashedFile:
    """``digest`` is None when the file could not be read or changed while it was read (``error`` says which).
    ``identity``: inode, size, mtime and ctime in ns of exactly the bytes that were hashed."""

    path: str
    digest: str | None
    identity: Identity | None
    error: str | None = None


class Cancelled(Exception):
    """The stop event was set."""


def identity(status: os.stat_result) -> Identity:
    """Return what tells that a file is still the one that was hashed. The device number is left out: it differs
    between containers. ctime is in: it alone shows an edit in place whose mtime was put back."""
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def git_sha1_start(size: int) -> bytes:
    """Return what git hashes before a file's bytes."""
    return b"blob %d\0" % size


class ByteCounter:
    """Bytes hashed so far, over all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.bytes = 0
        self.files = 0

    def add(self, count: int, files: int = 0) -> None:
        """Count ``count`` more bytes and ``files`` more finished files."""
        with self._lock:
            self.bytes += count
            self.files += files


def hash_file(
    root: Path, path: str, algo: str, counter: ByteCounter, stop: threading.Event, *, keep_cache: bool = True
) -> HashedFile:
    """Hash one file. ``keep_cache`` False drops its pages from the page cache as it goes. Raises Cancelled."""
    try:
        with (root / path).open("rb", buffering=0) as file:
            number = file.fileno()
            before = os.fstat(number)
            digest = hashlib.sha1(usedforsecurity=False) if algo == "git-sha1" else hashlib.sha256()
            if algo == "git-sha1":
                digest.update(git_sha1_start(before.st_size))
            buffer = bytearray(min(BUFFER, max(4096, before.st_size + 1)))
            view = memoryview(buffer)
            done = dropped = 0
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while count := file.readinto(buffer):
                if stop.is_set():
                    raise Cancelled
                digest.update(view[:count])
                done += count
                counter.add(count)
                if not keep_cache and done - dropped >= 32 << 20:
                    os.posix_fadvise(number, dropped, done - dropped, os.POSIX_FADV_DONTNEED)
                    dropped = done
            if not keep_cache:
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            after = os.fstat(number)
    except OSError as error:
        return HashedFile(path, None, None, f"cannot be read: {error.strerror or error}")
    counter.add(0, 1)
    if identity(before) != identity(after) or done != before.st_size:
        return HashedFile(path, None, None, "changed while it was read")
    return HashedFile(path, digest.hexdigest(), identity(after))


def hash_files(
    root: Path,
    jobs: Sequence[tuple[str, str, int]],
    stop: threading.Event,
    *,
    threads: int = 0,
    keep_cache: bool = True,
    on_progress: Callable[[int, int, float], None] | None = None,
) -> dict[str, HashedFile]:
    """Hash (path, algo, size) jobs and return the answers by path. Big files first, so that the last thread does not
    finish long after the rest.

    ``on_progress`` gets bytes, files, bytes per second about twenty times a second. Raises Cancelled within a
    buffer's time once ``stop`` is set.
    """
    counter = ByteCounter()
    threads = threads or len(os.sched_getaffinity(0))
    order = sorted(jobs, key=lambda job: -job[2])
    with ThreadPoolExecutor(max(1, min(threads, len(order))), "hash") as pool:
        futures = [
            pool.submit(hash_file, root, path, algo, counter, stop, keep_cache=keep_cache) for path, algo, _ in order
        ]
        start = time.monotonic()
        try:
            for future in futures:
                while not future.done():
                    if stop.wait(0.05) and not future.done():
                        raise Cancelled
                    elapsed = time.monotonic() - start
                    if on_progress and elapsed > 0.2:
                        on_progress(counter.bytes, counter.files, counter.bytes / elapsed)
            return {hashed.path: hashed for hashed in (future.result() for future in futures)}
        finally:
            # Whatever ends this loop, no thread goes on reading.
            if any(not future.done() for future in futures):
                stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
