"""Fetch the files that are missing: monitored, bounded, and without leaving anything behind."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config.schema import Settings
from ..errors import Stop, disk_full, from_os_error
from ..host import mounts
from ..units import format_bytes, format_duration
from . import cache, worker
from .hub import Hub, child_environ
from .hub_errors import stop_for
from .manifest import Entry
from .progress import DownloadMonitor, OnProgress, Phase
from .records import VerifiedFile

STALLS_BEFORE_HTTP = 1
MAX_STALLS = 3
MAX_DEATHS = 3
POLL_SECONDS = 0.25
LARGE_FOR_OVERLAY = 10 * 10**9  # bytes; so much in a container's own layer is worth a warning


@dataclass
class DownloadJob:
    """One repository at one commit. ``verified`` collects what was fetched and hashed, and
    ``on_verified`` hears of it; ``notes``: lines to log."""

    hub: Hub
    repo: str
    commit: str
    settings: Settings
    branch: str | None = None
    on_progress: OnProgress | None = None
    on_verified: Callable[[dict[str, VerifiedFile]], None] | None = None
    phase: Phase = "download"
    verified: dict[str, VerifiedFile] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def storage(self) -> Path:
        """The repository's folder in the cache."""
        return self.hub.folder(self.repo)

    def say(self, note: str) -> None:
        """Add a line to log, without secrets."""
        self.notes.append(self.hub.scrub(note))


async def fetch(job: DownloadJob, files: Sequence[Entry]) -> None:
    """Fetch ``files`` and hash each. Cancelling it kills the child and removes what is unfinished.

    Raises Stop: disk_full before the first byte when the sum does not fit, download_stalled, and what the hub says.
    """
    prepare_cache(job, files)
    clean(job)
    left = {entry.path: entry for entry in files}
    monitor = DownloadMonitor(job.phase, files, job.storage, job.settings.download_stall_timeout, job.on_progress)
    xet = job.settings.download_max_rate == 0
    if not xet and any(entry.algo == "sha256" for entry in files):
        job.say("RELAUNCH_DOWNLOAD_MAX_RATE is set: plain HTTP, because Xet cannot be held to a rate")
    stalls = deaths = 0
    try:
        while left:
            before = len(left)
            end = await _once(job, left, monitor, xet=xet)
            clean(job)
            if end is None:
                return
            if len(left) < before:
                stalls = deaths = 0
            if end == "stalled":
                stalls += 1
                lock = await asyncio.to_thread(cache.lock_holder, job.hub.cache, job.storage)
                if lock or stalls >= MAX_STALLS:
                    # Another process that holds a lock and moves nothing: starting again would only wait again.
                    raise _stalled(job, monitor, lock, stalls)
                how = "" if xet and stalls <= STALLS_BEFORE_HTTP else " over plain HTTP"
                job.say(
                    f"no new bytes for {format_duration(job.settings.download_stall_timeout)}: "
                    f"the download is started again{how}"
                )
                xet = xet and stalls <= STALLS_BEFORE_HTTP
            else:
                deaths += 1
                if deaths >= MAX_DEATHS:
                    raise Stop(
                        "hub_unavailable",
                        job.hub.scrub(f"{job.repo}: {end}, {deaths} times"),
                        "see the lines above; what was fetched is kept",
                    )
                job.say(f"{end}: started again over plain HTTP")
                xet = False
    finally:
        clean(job)


async def _once(job: DownloadJob, left: dict[str, Entry], monitor: DownloadMonitor, *, xet: bool) -> str | None:
    """One child's life. None: everything was fetched; ``stalled``; or how the child died."""
    settings = job.settings
    workers = settings.download_workers if cache.locks_supported(job.hub.cache) else 1
    request = {
        "op": "fetch",
        "repo": job.repo,
        "commit": job.commit,
        "branch": job.branch,
        "workers": workers,
        "attempts": worker.ATTEMPTS,
        "cache": str(job.hub.cache),
        "storage": str(job.storage),
        "max_rate": settings.download_max_rate,
        "files": [[e.path, e.size, e.algo, e.digest] for e in left.values()],
    }
    async with worker.DownloadProcess(request, child_environ(job.hub, xet=xet)) as process:
        monitor.process_started()
        events = process.events()
        pending: asyncio.Task[dict[str, Any]] | None = None
        try:
            while True:
                pending = pending or asyncio.ensure_future(anext(events))
                done, _ = await asyncio.wait({pending}, timeout=POLL_SECONDS)
                if await asyncio.to_thread(monitor.stalled):
                    return "stalled"
                if not done:
                    continue
                try:
                    event = pending.result()
                except StopAsyncIteration:
                    return None if not left else "the download process ended early"
                finally:
                    pending = None
                died = _take(job, event, left, monitor)
                if died:
                    return died
        finally:
            if pending is not None:
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)


def _take(job: DownloadJob, event: dict[str, Any], left: dict[str, Entry], monitor: DownloadMonitor) -> str | None:
    """One event of the child. Returns how it died, when it did; raises Stop for what no restart can mend."""
    kind = event["event"]
    if kind == "ready":
        monitor.process_ready()
    elif kind == "bytes":
        monitor.received(int(event["total"]))
    elif kind == "wait":
        seconds = float(event["seconds"])
        monitor.wait_requested(seconds, job.hub.scrub(f"waiting {format_duration(seconds)}: {event['text']}"))
    elif kind == "note":
        job.say(str(event["text"]))
    elif kind == "file":
        identity = event["identity"]
        job.verified[event["path"]] = VerifiedFile(
            int(identity[1]),
            event["algo"],
            event["digest"],
            (identity[0], identity[1], identity[2], identity[3]),
            time.time(),
        )
        left.pop(event["path"], None)
        monitor.file_finished(int(identity[1]))
        if job.on_verified:
            job.on_verified(job.verified)
    elif kind == "bad":
        raise Stop(
            "weights_corrupt",
            f"{job.repo}: {event['path']} came twice with "
            f"{event['algo']} {event['digest']} instead of {event['wanted']}",
            "the hub, a mirror or a proxy serves wrong bytes: check HF_ENDPOINT, or RELAUNCH_MANIFEST if you gave one",
        )
    elif kind == "error":
        if event.get("kind") == "died":
            return str(event["text"])
        raise stop_for(event, job.hub, job.repo, job.commit)
    return None


def prepare_cache(job: DownloadJob, files: Sequence[Entry], credit: int = 0) -> None:
    """A cache that can be written and has room for the sum. Raises Stop before the first byte. ``credit``: bytes of
    damaged files that will be removed first."""
    hub, place = job.hub, job.storage / "blobs"
    try:
        for folder in (place, job.storage / "snapshots", hub.cache / ".locks" / job.storage.name):
            folder.mkdir(parents=True, exist_ok=True)
            # A file without a name: another process may probe the same folder.
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise from_os_error(error, folder, hub.setting) from None
    need, free = sum(entry.size or 0 for entry in files), cache.free_bytes(place) + credit
    if need > free:
        raise disk_full(hub.cache, hub.setting, need, free)
    if need > LARGE_FOR_OVERLAY and mounts.file_system(hub.cache) == "overlay":
        job.say(
            f"{hub.cache} lies in the container's own layer: {format_bytes(need)} will be fetched again "
            f"by the next container; mount a volume there"
        )
    if not cache.locks_supported(hub.cache):
        job.say(f"the file system of {hub.cache} has no file locks: one download worker; start one process only")


def clean(job: DownloadJob) -> None:
    """Remove unfinished files that no process works on."""
    with contextlib.suppress(OSError):
        files, freed = cache.remove_orphans(job.hub.cache, job.storage, time.time())
        if files:
            job.say(f"removed {files} unfinished files ({format_bytes(freed)}) that no process was working on")


def _stalled(job: DownloadJob, monitor: DownloadMonitor, lock: tuple[Path, int] | None, stalls: int) -> Stop:
    where = f"; the lock {lock[0]} is held by process {lock[1]}" if lock else ""
    return Stop(
        "download_stalled",
        f"{job.repo}: no new bytes for {format_duration(job.settings.download_stall_timeout)}, {stalls} times, "
        f"{monitor.files} of {monitor.files_total} files fetched{where}",
        "stop that process" if lock else "check the network and HTTPS_PROXY; what was fetched is kept",
    )
