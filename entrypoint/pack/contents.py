"""What lies in a pack, and how its files get there: each once, whole, read back, and not again in a second run.

A pack is one directory: `pack.json` (written last), `SHA256SUMS` for every other file, `unpack` (the command of the
other side), `relaunch.tar`, `wheels/`, and where asked for `kernels.tar`, `image-*.tar`, `weights/`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..errors import Stop, disk_full, from_os_error, nearest, unreadable
from ..units import MIB, format_bytes
from ..weights import hashing

DOCUMENT = "pack.json"
SUMS = "SHA256SUMS"
PARTIAL = ".part"
# Files at a time: downloads wait for the network, copies for the disk.
WORKERS = 4
# Left free beside what is written: directories, the document, a neighbour's log.
SPARE_BYTES = 64 * MIB
# A copy looks this often, in bytes, whether it is to end.
COPIED_AT_ONCE = 256 * MIB


class Reports(Protocol):
    """Where a pack says what it does: lines that stay, and one that changes."""

    def line(self, text: str) -> None: ...
    def progress(self, text: str) -> None: ...


@dataclass(frozen=True)
class Item:
    """One file to be. ``path`` in the target directory; ``size`` in bytes, None where only writing it tells.
    ``write(partial, stop)`` puts it there, may go on with what an earlier run left, and ends once ``stop`` is set.
    ``digest``: the SHA-256 that it must have, where that is known; ``source``: the file that it is a copy of, whose
    time it gets too. Of neither, only one that is ``named_by_content`` is kept by a second run."""

    path: str
    size: int | None
    write: Callable[[Path, threading.Event], None]
    digest: str | None = None
    source: Path | None = None
    named_by_content: bool = False


def need_space(wanted: Mapping[Path, int], setting: str) -> None:
    """Raise Stop (73) unless every file system has room for the bytes that go to the directories on it."""
    by_device: dict[int, tuple[Path, int]] = {}
    for place, count in wanted.items():
        device = os.stat(nearest(place)).st_dev
        first, before = by_device.get(device, (place, 0))
        by_device[device] = first, before + count
    for place, count in by_device.values():
        status = os.statvfs(nearest(place))
        free = status.f_bavail * status.f_frsize
        if count and free < count + SPARE_BYTES:
            raise disk_full(place, setting, count + SPARE_BYTES, free)


def sums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 by path that `SHA256SUMS` has; empty without one. A line that is cut off is left out."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / SUMS).read_text(errors="replace").splitlines():
            digest, _, path = line.partition("  ")
            if len(digest) == 64 and path:
                found[path] = digest
    return found


def write_sums(folder: Path, known: Mapping[str, str]) -> None:
    """Write `SHA256SUMS`, as ``sha256sum -c`` reads it. Raises OSError."""
    partial = folder / (SUMS + PARTIAL)
    partial.write_text("".join(f"{digest}  {path}\n" for path, digest in sorted(known.items())))
    os.replace(partial, folder / SUMS)


def digest(folder: Path, path: str) -> str:
    """Return the SHA-256 of one file of a pack. Raises OSError when it cannot be read."""
    with (folder / path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def missing(folder: Path, items: Iterable[Item], known: Mapping[str, str]) -> list[Item]:
    """Return the items that ``folder`` does not hold yet. ``known``: the digests of what was written whole."""
    return [item for item in items if not _is_there(folder / item.path, item, known.get(item.path))]


def _is_there(target: Path, item: Item, digest: str | None) -> bool:
    tells = item.digest or item.source or item.named_by_content
    if digest is None or not tells or (item.digest or digest) != digest:
        return False
    try:
        status = target.stat()
    except OSError:
        return False
    same_time = item.source is None or item.source.stat().st_mtime_ns == status.st_mtime_ns
    return same_time and item.size in (None, status.st_size)


def bytes_left(folder: Path, items: Iterable[Item]) -> int:
    """Return the bytes that writing ``items`` still takes: not those of files that become hard links, nor what an
    earlier run left."""
    left, device = 0, os.stat(nearest(folder)).st_dev
    for item in items:
        if item.source is not None and item.source.stat().st_dev == device:
            continue
        partial = folder / (item.path + PARTIAL)
        left += max(0, (item.size or 0) - (partial.stat().st_size if partial.exists() else 0))
    return left


def write(folder: Path, items: Sequence[Item], setting: str, shown: Reports, *, note: bool = True) -> dict[str, str]:
    """Write ``items`` under ``folder``, several at a time; return their digests. Each is read back and, with ``note``,
    put down in `SHA256SUMS` at once, so that a second run goes on where this one ended. Raises Stop: 73 for the disk,
    65 for a file that is not what it must be."""
    lock, done, total = threading.Lock(), [0], sum(item.size or 0 for item in items)
    digests: dict[str, str] = {}
    stop = threading.Event()

    def one(item: Item) -> None:
        digest = _write(folder, item, stop)
        with lock:
            digests[item.path] = digest
            done[0] += item.size or 0
            if note:
                with (folder / SUMS).open("a") as file:
                    file.write(f"{digest}  {item.path}\n")
        shown.progress(f"relaunch: {format_bytes(done[0])} of {format_bytes(total)}: {item.path}")

    order = sorted(items, key=lambda item: -(item.size or 0))
    with ThreadPoolExecutor(WORKERS, "pack") as pool:
        futures = {pool.submit(one, item) for item in order}
        try:
            while futures:
                finished, futures = wait(futures, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
        except OSError as error:
            raise from_os_error(error, Path(error.filename or folder), setting) from None
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    return digests


def _write(folder: Path, item: Item, stop: threading.Event) -> str:
    target, partial = folder / item.path, folder / (item.path + PARTIAL)
    target.parent.mkdir(parents=True, exist_ok=True)
    item.write(partial, stop)
    hashed = hashing.hash_file(folder, item.path + PARTIAL, "sha256", hashing.ByteCounter(), stop)
    if hashed.digest is None or (item.digest or hashed.digest) != hashed.digest:
        partial.unlink(missing_ok=True)
        said = hashed.error or f"has the SHA-256 {hashed.digest} instead of {item.digest}"
        raise damaged(f"{item.path} {said}", "run the same command again: it is fetched anew")
    if item.source is not None:
        mtime = item.source.stat().st_mtime_ns
        os.utime(partial, ns=(mtime, mtime))
    os.replace(partial, target)
    return hashed.digest


def prove(folder: Path, known: Mapping[str, str], shown: Reports) -> None:
    """Hash every file of a pack. Raises Stop: 66 naming one that is missing, 65 naming those that are damaged."""
    sizes = {}
    for path in known:
        try:
            sizes[path] = (folder / path).stat().st_size
        except OSError as error:
            raise unreadable(f"{folder / path}: {error.strerror}", "the pack is not whole: carry it again") from None
    total = sum(sizes.values())

    def progress(done: int, files: int, rate: float) -> None:
        shown.progress(f"relaunch: proving {format_bytes(done)} of {format_bytes(total)}, {format_bytes(rate)}/s")

    jobs = [(path, "sha256", size) for path, size in sizes.items()]
    found = hashing.hash_files(folder, jobs, threading.Event(), keep_cache=False, on_progress=progress)
    bad = sorted(path for path, hashed in found.items() if hashed.digest != known[path])
    if bad:
        others = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise damaged(f"{folder / bad[0]}{others}: the bytes are not those that were packed", "carry the pack again")


def damaged(message: str, next_step: str) -> Stop:
    """Return the Stop for bytes that are not what was packed (exit 65)."""
    return Stop("weights_corrupt", message, next_step)


def copied(source: Path, path: str, digest: str | None = None) -> Item:
    """Return the item that is a copy of ``source``: a hard link where both are on one file system."""

    def write(partial: Path, stop: threading.Event) -> None:
        partial.unlink(missing_ok=True)
        try:
            os.link(source.resolve(), partial)
        except OSError:
            _copy(source, partial, stop)

    return Item(path, source.stat().st_size, write, digest, source)


def _copy(source: Path, target: Path, stop: threading.Event) -> None:
    with source.open("rb", buffering=0) as reader, target.open("wb", buffering=0) as writer:
        left = os.fstat(reader.fileno()).st_size
        while left and not stop.is_set():
            count = os.copy_file_range(reader.fileno(), writer.fileno(), min(left, COPIED_AT_ONCE))
            if not count:
                break
            left -= count
