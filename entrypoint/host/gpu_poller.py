"""What the GPUs hold now, for a scrape that must not wait: read in a thread and kept for a moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from . import nvml
from .nvml import GpuReading

# Seconds for which a reading is new enough: less than the usual scrape interval, more than one reading takes.
MAX_AGE = 2.0


class GpuPoller:
    """Reads the GPUs in a thread, one reading at a time, however often it is asked.

    A GPU that fell off the bus can block NVML for minutes; a scrape then gets the last reading.
    """

    def __init__(self, read: Callable[[], tuple[GpuReading, ...]] = nvml.readings, max_age: float = MAX_AGE) -> None:
        """``read`` may block; ``max_age``: seconds after which a reading is renewed."""
        self._read = read
        self._max_age = max_age
        self._latest: tuple[GpuReading, ...] = ()
        self._at = float("-inf")
        self._busy = threading.Lock()

    def latest(self) -> tuple[GpuReading, ...]:
        """The newest reading, at once; empty before the first one and on a host without GPUs. Starts a new reading
        when this one is old."""
        if time.monotonic() - self._at >= self._max_age and self._busy.acquire(blocking=False):
            threading.Thread(target=self._refresh, name="gpus", daemon=True).start()
        return self._latest

    def _refresh(self) -> None:
        try:
            self._latest = self._read()
        finally:
            self._at = time.monotonic()
            self._busy.release()
