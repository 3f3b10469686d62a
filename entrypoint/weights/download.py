"""Fetch the files that are missing: watched, bounded, and without leaving anything behind."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config.schema import Settings
from ..errors import Stop
from ..host import mounts
from ..units import format_bytes, format_duration
from . import faults, layout, locks, records, refusals
from . import manifest as manifests
from .common import Entry, Manifest, Phase, Progress
from .environment import Hub, child_environ
from .worker import Worker

OnProgress = Callable[[Progress], None]
RESTARTS_BEFORE_HTTP = 1
MAX_STALLS = 3
MAX_DEATHS = 3
POLL_SECONDS = 0.25
START_SECONDS = 60.0  # a child may take this long to begin, on a busy host
ATTEMPTS = 5  # tries of one request, over about 15 s, before the hub counts as down


@dataclass
class Job:
    """One repository at one commit. ``proven`` collects what was fetched and hashed; ``notes`` what to log."""

    hub: Hub
    repo: str
    commit: str
    settings: Settings
    branch: str | None = None
    on_progress: OnProgress | None = None
    on_proven: Callable[[dict[str, records.Proven]], None] | None = None
    phase: Phase = "download"
    proven: dict[str, records.Proven] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def storage(self) -> Path:
        return self.hub.folder(self.repo)

    def say(self, note: str) -> None:
        self.notes.append(self.hub.scrub(note))


async def tree(hub: Hub, repo: str, revision: str, *, write: bool) -> tuple[str, Manifest]:
    """Ask the hub which commit ``revision`` is and what it holds. Raises Stop."""
    request = {
        "op": "tree",
        "repo": repo,
        "revision": revision,
        "storage": str(hub.folder(repo)),
        "write": write,
        "attempts": ATTEMPTS,
    }
    async with Worker(request, child_environ(hub, xet=False)) as worker:
        async for event in worker.events():
            if event["event"] == "tree":
                document = {"format_version": 1, "files": event["files"]}
                try:
                    return str(event["commit"]), manifests.parse(document, "the hub's listing")[1]
                except ValueError as error:
                    raise refusals.stop_for(
                        {"kind": "not_a_hub", "text": f"its listing is no listing: {error}"}, hub, repo, revision
                    ) from None
            if event["event"] == "error":
                raise refusals.stop_for(event, hub, repo, revision)
    raise refusals.stop_for({"kind": "other", "text": "no answer"}, hub, repo, revision)


async def fetch(job: Job, files: Sequence[Entry]) -> None:
    """Fetch ``files`` and hash each. Cancelling it kills the child and removes what is unfinished.

    Raises Stop: disk_full before the first byte when the sum does not fit, download_stalled, and what the hub says.
    """
    prepare_cache(job, files)
    clean(job)
    left = {entry.path: entry for entry in files}
    watch = Watch(job, files)
    xet = job.settings.download_max_rate == 0
    if not xet and any(entry.algo == "sha256" for entry in files):
        job.say("RELAUNCH_DOWNLOAD_MAX_RATE is set: plain HTTP, because Xet cannot be held to a rate")
    stalls = deaths = 0
    try:
        while left:
            before = len(left)
            end = await _once(job, left, watch, xet=xet)
            clean(job)
            if end is None:
                return
            if len(left) < before:
                stalls = deaths = 0
            if end == "stalled":
                stalls += 1
                lock = await asyncio.to_thread(locks.holder, job.hub.cache, job.storage, set())
                if lock or stalls >= MAX_STALLS:
                    # Another process that holds a lock and moves nothing: starting again would only wait again.
                    raise _stalled(job, watch, lock, stalls)
                how = "" if xet and stalls <= RESTARTS_BEFORE_HTTP else " over plain HTTP"
                job.say(
                    f"no new bytes for {format_duration(job.settings.download_stall_timeout)}: "
                    f"the download is started again{how}"
                )
                xet = xet and stalls <= RESTARTS_BEFORE_HTTP
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


async def _once(job: Job, left: dict[str, Entry], watch: Watch, *, xet: bool) -> str | None:
    """One child's life. None: everything was fetched; ``stalled``; or how the child died."""
    settings = job.settings
    workers = settings.download_workers if locks.supported(job.hub.cache) else 1
    request = {
        "op": "fetch",
        "repo": job.repo,
        "commit": job.commit,
        "branch": job.branch,
        "workers": workers,
        "attempts": ATTEMPTS,
        "cache": str(job.hub.cache),
        "storage": str(job.storage),
        "max_rate": settings.download_max_rate,
        "files": [[e.path, e.size, e.algo, e.digest] for e in left.values()],
    }
    async with Worker(request, child_environ(job.hub, xet=xet)) as worker:
        watch.start()
        events = worker.events()
        pending: asyncio.Task[dict[str, Any]] | None = None
        try:
            while True:
                pending = pending or asyncio.ensure_future(anext(events))
                done, _ = await asyncio.wait({pending}, timeout=POLL_SECONDS)
                if await asyncio.to_thread(watch.stalled):
                    return "stalled"
                if not done:
                    continue
                try:
                    event = pending.result()
                except StopAsyncIteration:
                    return None if not left else "the download process ended early"
                finally:
                    pending = None
                died = _take(job, event, left, watch)
                if died:
                    return died
        finally:
            if pending is not None:
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)


def _take(job: Job, event: dict[str, Any], left: dict[str, Entry], watch: Watch) -> str | None:
    """One event of the child. Returns how it died, when it did; raises Stop for what no restart can mend."""
    kind = event["event"]
    if kind == "ready":
        watch.ready()
    elif kind == "bytes":
        watch.bytes(int(event["total"]))
    elif kind == "wait":
        watch.excuse(float(event["seconds"]))
        watch.note = job.hub.scrub(f"waiting {format_duration(float(event['seconds']))}: {event['text']}")
        watch.report()
    elif kind == "note":
        job.say(str(event["text"]))
    elif kind == "file":
        identity = event["identity"]
        job.proven[event["path"]] = records.Proven(
            int(identity[1]),
            event["algo"],
            event["digest"],
            (identity[0], identity[1], identity[2], identity[3]),
            time.time(),
        )
        left.pop(event["path"], None)
        watch.finished(int(identity[1]))
        if job.on_proven:
            job.on_proven(job.proven)
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
        raise refusals.stop_for(event, job.hub, job.repo, job.commit)
    return None


class Watch:
    """Bytes, rate, estimate; and whether anything still moves."""

    def __init__(self, job: Job, files: Sequence[Entry]) -> None:
        self.job = job
        self.total = sum(entry.size or 0 for entry in files)
        self.files_total = len(files)
        self.files = 0
        self.note = ""
        self._done = 0
        self._base = 0
        self._child = 0
        self._samples: deque[tuple[float, int]] = deque(maxlen=40)
        self._moved = time.monotonic()
        self._disk = (0, 0)
        self._said = 0.0

    def start(self) -> None:
        """A new child: what its predecessor had not finished is lost."""
        self._base, self._child = self._done, 0
        self._moved = time.monotonic() + START_SECONDS
        self._samples.clear()

    def ready(self) -> None:
        """The child has started: from now on it has to move."""
        self._moved = time.monotonic()

    def bytes(self, total: int) -> None:
        if total > self._child:
            self._child = total
            self._moved = max(self._moved, time.monotonic())
            self.note = ""
        self.report()

    def excuse(self, seconds: float) -> None:
        """A wait that the hub asked for is not a stall."""
        self._moved = time.monotonic() + seconds

    def finished(self, size: int) -> None:
        self._done += size
        self.files += 1
        self._moved = max(self._moved, time.monotonic())
        self.report()

    def stalled(self) -> bool:
        """True when neither the child nor the disk (another process may be fetching the same file) moved."""
        disk = locks.activity(self.job.storage)
        if disk != self._disk:
            grew, self._disk = disk[0] - self._disk[0], disk
            self._moved = max(self._moved, time.monotonic())
            # Xet writes behind the counted client.
            if grew > 0 and self._child == 0:
                self.report()
        return time.monotonic() - self._moved > self.job.settings.download_stall_timeout

    def report(self) -> None:
        if self.job.on_progress is None:
            return
        now = time.monotonic()
        done = min(self.total, max(self._done, self._base + max(self._child, self._disk[0])))
        self._samples.append((now, done))
        if now - self._said < 0.2 and not self.note:
            return
        self._said = now
        first, seconds = self._samples[0][1], now - self._samples[0][0]
        rate = max(0.0, (done - first) / seconds) if seconds > 0.5 else 0.0
        self.job.on_progress(Progress(self.job.phase, done, self.total, self.files, self.files_total, rate, self.note))


def prepare_cache(job: Job, files: Sequence[Entry], credit: int = 0) -> None:
    """A cache that can be written and has room for the sum. Raises Stop before the first byte. ``credit``: bytes of
    damaged files that will be removed first."""
    hub, place = job.hub, job.storage / "blobs"
    try:
        for folder in (place, job.storage / "snapshots", hub.cache / ".locks" / job.storage.name):
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / ".relaunch-probe"
            probe.touch()
            probe.unlink()
    except OSError as error:
        named = Path(error.filename) if error.filename else place
        raise faults.from_os_error(error, named, hub.setting) from None
    need, free = sum(entry.size or 0 for entry in files), layout.free_bytes(place) + credit
    if need > free:
        raise faults.disk_full(hub.cache, hub.setting, need, free)
    if need > 10 * 10**9 and mounts.file_system(hub.cache) == "overlay":
        job.say(
            f"{hub.cache} lies in the container's own layer: {format_bytes(need)} will be fetched again "
            f"by the next container; mount a volume there"
        )
    if not locks.supported(hub.cache):
        job.say(f"the file system of {hub.cache} has no file locks: one download worker; start one process only")


def clean(job: Job) -> None:
    """Remove unfinished files that no process works on."""
    with contextlib.suppress(OSError):
        files, freed = locks.remove_orphans(job.hub.cache, job.storage, time.time())
        if files:
            job.say(f"removed {files} unfinished files ({format_bytes(freed)}) that no process was working on")


def _stalled(job: Job, watch: Watch, lock: tuple[Path, int] | None, stalls: int) -> Stop:
    where = f"; the lock {lock[0]} is held by process {lock[1]}" if lock else ""
    return Stop(
        "download_stalled",
        f"{job.repo}: no new bytes for {format_duration(job.settings.download_stall_timeout)}, {stalls} times, "
        f"{watch.files} of {watch.files_total} files fetched{where}",
        "stop that process" if lock else "check the network and HTTPS_PROXY; what was fetched is kept",
    )
