"""How far a job of this room is: bytes, files, rate and time left; and whether a download still moves."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from . import cache
from .manifest import Entry

Phase = Literal["resolve", "download", "verify", "repair"]

START_SECONDS = 60.0  # a download process may take this long to begin, on a busy host
REPORT_SECONDS = 0.2  # reports are at least this far apart
RATE_SAMPLES = 40  # the rate is taken over this many reports


@dataclass(frozen=True)
class TransferProgress:
    """One report. ``rate`` in bytes per second over the last seconds, 0 when not known yet."""

    phase: Phase
    bytes: int = 0
    bytes_total: int = 0
    files: int = 0
    files_total: int = 0
    rate: float = 0.0
    note: str = ""

    @property
    def remaining_seconds(self) -> float | None:
        """The time left at this rate; None while there is no rate."""
        return (self.bytes_total - self.bytes) / self.rate if self.rate > 0 else None


OnProgress = Callable[[TransferProgress], None]


class DownloadMonitor:
    """Bytes and rate of one download, and whether its process or its disk moved within ``stall_timeout`` seconds."""

    def __init__(
        self,
        phase: Phase,
        files: Sequence[Entry],
        storage: Path,
        stall_timeout: float,
        on_progress: OnProgress | None,
    ) -> None:
        self.note = ""
        self.files = 0
        self.files_total = len(files)
        self._phase = phase
        self._storage = storage
        self._stall_timeout = stall_timeout
        self._on_progress = on_progress
        self._total = sum(entry.size or 0 for entry in files)
        self._finished = 0  # bytes of finished files
        self._base = 0  # of them, those that the current process found finished
        self._received = 0  # bytes that the current process has received
        self._on_disk = (0, 0)  # bytes and newest change of unfinished files
        self._samples: deque[tuple[float, int]] = deque(maxlen=RATE_SAMPLES)
        self._moved = time.monotonic()
        self._reported = 0.0

    def process_started(self) -> None:
        """A new download process: what its predecessor had not finished is lost."""
        self._base, self._received = self._finished, 0
        self._moved = time.monotonic() + START_SECONDS
        self._samples.clear()

    def process_ready(self) -> None:
        """The process has loaded the client: from now on it has to move."""
        self._moved = time.monotonic()

    def received(self, total: int) -> None:
        """``total`` bytes have come to the current process so far."""
        if total > self._received:
            self._received = total
            self._moved = max(self._moved, time.monotonic())
            self.note = ""
        self.report()

    def wait_requested(self, seconds: float, note: str) -> None:
        """A wait that the hub asked for is not a stall."""
        self._moved = time.monotonic() + seconds
        self.note = note
        self.report()

    def file_finished(self, size: int) -> None:
        """One file of ``size`` bytes has come and was hashed."""
        self._finished += size
        self.files += 1
        self._moved = max(self._moved, time.monotonic())
        self.report()

    def stalled(self) -> bool:
        """Return True when neither the process nor the disk moved (another process may be fetching the same file)."""
        on_disk = cache.unfinished_activity(self._storage)
        if on_disk != self._on_disk:
            grew, self._on_disk = on_disk[0] - self._on_disk[0], on_disk
            self._moved = max(self._moved, time.monotonic())
            # Xet writes behind the client whose bytes are counted.
            if grew > 0 and self._received == 0:
                self.report()
        return time.monotonic() - self._moved > self._stall_timeout

    def report(self) -> None:
        """Call ``on_progress``, unless the last report was a moment ago and there is nothing to say."""
        if self._on_progress is None:
            return
        now = time.monotonic()
        done = min(self._total, max(self._finished, self._base + max(self._received, self._on_disk[0])))
        self._samples.append((now, done))
        if now - self._reported < REPORT_SECONDS and not self.note:
            return
        self._reported = now
        first, seconds = self._samples[0][1], now - self._samples[0][0]
        rate = max(0.0, (done - first) / seconds) if seconds > 0.5 else 0.0
        self._on_progress(
            TransferProgress(self._phase, done, self._total, self.files, self.files_total, rate, self.note)
        )
