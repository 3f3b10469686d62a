"""GPUs, their links and their tenants, from NVML. Every call that a driver refuses leaves a None, never an error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any, TypeVar

from .facts import Card, Holder, Peer
from .inventory import Gpu

T = TypeVar("T")

_THROTTLE = {
    "nvmlClocksThrottleReasonHwSlowdown": "hw_slowdown",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "hw_thermal_slowdown",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "hw_power_brake",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "sw_thermal_slowdown",
    "nvmlClocksThrottleReasonSwPowerCap": "sw_power_cap",
}
# nvmlGpuP2PStatus_t.
_P2P = {
    1: "chipset not supported",
    2: "GPU not supported",
    3: "topology not supported",
    4: "disabled by registry key",
    5: "not supported",
    6: "unknown",
}

# NVML_P2P_CAPS_INDEX_READ. The binding's own constant is a tuple (a stray comma), which ctypes refuses.
_READ = 0


def read(
    gpus: tuple[Gpu, ...], container_of: Callable[[int], str | None], is_ours: Callable[[int], bool]
) -> tuple[tuple[Card, ...], tuple[Holder, ...], tuple[Peer, ...]]:
    """Cards in the order of ``gpus``. Empty when there are none."""
    if not gpus:
        return (), (), ()
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return tuple(_plain(gpu) for gpu in gpus), (), ()
    try:
        handles = {gpu.index: pynvml.nvmlDeviceGetHandleByIndex(gpu.index) for gpu in gpus}
        cards = tuple(_card(gpu, handles[gpu.index]) for gpu in gpus)
        holders = tuple(h for i, handle in handles.items() for h in _holders(i, handle, container_of, is_ours))
        return cards, holders, _peers(handles)
    except pynvml.NVMLError:
        return tuple(_plain(gpu) for gpu in gpus), (), ()
    finally:
        pynvml.nvmlShutdown()


def _plain(gpu: Gpu) -> Card:
    return Card(gpu.index, gpu.name, gpu.sm, gpu.total_bytes, gpu.free_bytes, gpu.pci_bus_id, gpu.numa_node)


def _card(gpu: Gpu, handle: Any) -> Card:
    import pynvml as nv

    remaps = _ask(lambda: nv.nvmlDeviceGetRemappedRows(handle))  # corrected, uncorrected, pending, failed
    reasons = _ask(lambda: int(nv.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))
    limit = _ask(lambda: nv.nvmlDeviceGetPowerManagementLimit(handle) / 1000)
    default = _ask(lambda: nv.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000)
    return Card(
        gpu.index,
        gpu.name,
        gpu.sm,
        gpu.total_bytes,
        gpu.free_bytes,
        gpu.pci_bus_id,
        gpu.numa_node,
        persistence=_ask(lambda: bool(nv.nvmlDeviceGetPersistenceMode(handle))),
        bar1_bytes=_ask(lambda: int(nv.nvmlDeviceGetBAR1MemoryInfo(handle).bar1Total)),
        remap_pending=bool(remaps[2]) if remaps else None,
        remap_failed=bool(remaps[3]) if remaps else None,
        throttle=None if reasons is None else tuple(w for n, w in _THROTTLE.items() if reasons & getattr(nv, n, 0)),
        power_limit_watts=limit,
        power_default_watts=default,
        temperature=_ask(lambda: int(nv.nvmlDeviceGetTemperature(handle, nv.NVML_TEMPERATURE_GPU))),
        width=_ask(lambda: int(nv.nvmlDeviceGetCurrPcieLinkWidth(handle))),
        width_max=_ask(lambda: int(nv.nvmlDeviceGetMaxPcieLinkWidth(handle))),
    )


def _ask(call: Callable[[], T]) -> T | None:
    try:
        return call()
    except Exception:  # NVMLError, and what ctypes raises where binding and driver disagree: one fact less
        return None


def _holders(
    index: int, handle: Any, container_of: Callable[[int], str | None], is_ours: Callable[[int], bool]
) -> list[Holder]:
    import psutil
    import pynvml

    found = {}
    for call in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        for process in _ask(partial(call, handle)) or ():
            found[int(process.pid)] = getattr(process, "usedGpuMemory", None)
    holders = []
    for pid, used in found.items():
        try:
            name = str(psutil.Process(pid).name())
        except psutil.Error:
            name = "a process outside this container"
        holders.append(Holder(index, pid, name, int(used) if used else None, container_of(pid), is_ours(pid)))
    return holders


def _peers(handles: dict[int, Any]) -> tuple[Peer, ...]:
    import pynvml

    def readable(a: Any, b: Any) -> int:
        return int(pynvml.nvmlDeviceGetP2PStatus(a, b, _READ))

    found = []
    for a, b in permutations(handles, 2):
        status = _ask(partial(readable, handles[a], handles[b]))
        if status is not None:
            found.append(Peer(a, b, status == 0, _P2P.get(status, "")))
    return tuple(found)
