"""What the GPUs hold now, from NVML, read in a thread and kept for a moment.

A card that fell off the bus can block NVML for minutes: a scrape never waits for it, and one reading is under way
at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TTL = 2.0


@dataclass(frozen=True)
class GpuReading:
    """One GPU now. Bytes, ratio 0 to 1, degrees Celsius, watts; None: the driver does not say."""

    index: int
    total_bytes: int
    used_bytes: int
    utilization: float | None = None
    temperature: int | None = None
    watts: float | None = None


class Gpus:
    """``latest`` never blocks: it returns what is known and starts a new reading when that is old."""

    def __init__(self, read: Callable[[], tuple[GpuReading, ...]] | None = None, ttl: float = TTL) -> None:
        self._read = read or read_nvml
        self._ttl = ttl
        self._latest: tuple[GpuReading, ...] = ()
        self._at = float("-inf")
        self._busy = threading.Lock()

    def latest(self) -> tuple[GpuReading, ...]:
        """The newest reading, empty before the first one and on a box without GPUs."""
        if time.monotonic() - self._at >= self._ttl and self._busy.acquire(blocking=False):
            threading.Thread(target=self._refresh, name="gpus", daemon=True).start()
        return self._latest

    def _refresh(self) -> None:
        try:
            self._latest = self._read()
        finally:
            self._at = time.monotonic()
            self._busy.release()


def read_nvml() -> tuple[GpuReading, ...]:
    """Every GPU that answers. Blocking."""
    import pynvml as nv

    try:
        nv.nvmlInit()
    except nv.NVMLError:
        return ()
    found = []
    try:
        for index in range(nv.nvmlDeviceGetCount()):
            try:
                handle = nv.nvmlDeviceGetHandleByIndex(index)
                memory = nv.nvmlDeviceGetMemoryInfo(handle)
            except nv.NVMLError:
                continue
            found.append(GpuReading(index, int(memory.total), int(memory.used), *_more(handle)))
    except nv.NVMLError:
        pass
    finally:
        nv.nvmlShutdown()
    return tuple(found)


def _more(handle: Any) -> tuple[float | None, int | None, float | None]:
    """Utilization, temperature and power of one GPU."""
    import pynvml as nv

    busy = _ask(nv.nvmlDeviceGetUtilizationRates, handle)
    heat = _ask(nv.nvmlDeviceGetTemperature, handle, nv.NVML_TEMPERATURE_GPU)
    power = _ask(nv.nvmlDeviceGetPowerUsage, handle)
    return None if busy is None else busy.gpu / 100, heat, None if power is None else power / 1000


def _ask(call: Callable[..., Any], *arguments: Any) -> Any:
    import pynvml as nv

    try:
        return call(*arguments)
    except nv.NVMLError:
        return None
