"""Free GPU memory and who holds the rest, from NVML. Blocking: call it from a thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Holder:
    """A process with memory on a GPU. ``bytes`` None: the driver does not say (other PID namespace)."""

    gpu: int
    pid: int
    name: str
    bytes: int | None


def free_bytes(indices: Sequence[int]) -> dict[int, int]:
    """Free bytes by GPU index; a GPU that no longer answers is absent."""
    import pynvml

    free: dict[int, int] = {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return free
    try:
        for index in indices:
            try:
                free[index] = int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index)).free)
            except pynvml.NVMLError:
                continue
    finally:
        pynvml.nvmlShutdown()
    return free


def holders(indices: Sequence[int]) -> list[Holder]:
    """Processes that hold memory on these GPUs."""
    import pynvml

    found: list[Holder] = []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return found
    try:
        for index in indices:
            try:
                processes = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(index))
            except pynvml.NVMLError:
                continue
            for process in processes:
                used = getattr(process, "usedGpuMemory", None)
                found.append(Holder(index, int(process.pid), _name(int(process.pid)), int(used) if used else None))
    finally:
        pynvml.nvmlShutdown()
    return found


def _name(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return "a process outside this container"
