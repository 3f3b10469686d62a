"""The only module that asks NVML: what the GPUs are, how loaded and healthy they are, and who holds their memory.

Every function opens NVML, asks and closes it again, and blocks meanwhile: a GPU that fell off the bus can hold a call
for minutes, so an event loop asks from a thread. What a driver refuses to say is None; where NVML itself cannot be
used, all but `inventory` answer with nothing. Sizes in bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import psutil

from . import pci
from .inventory import Gpu

# The pinned torch is built for CUDA 13.0, whose first driver is 580.65.06 (CUDA 13.0 release notes, table 3).
MINIMUM_DRIVER = "580.65.06"
# nvmlClocksThrottleReasons bits, by the name under which the doctor document lists them.
_THROTTLE_REASONS = {
    "nvmlClocksThrottleReasonHwSlowdown": "hw_slowdown",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "hw_thermal_slowdown",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "hw_power_brake",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "sw_thermal_slowdown",
    "nvmlClocksThrottleReasonSwPowerCap": "sw_power_cap",
}
# nvmlGpuP2PStatus_t.
_P2P_STATUS = {
    1: "chipset not supported",
    2: "GPU not supported",
    3: "topology not supported",
    4: "disabled by registry key",
    5: "not supported",
    6: "unknown",
}
# NVML_P2P_CAPS_INDEX_READ. The binding's own constant is a tuple (a stray comma), which ctypes refuses.
_P2P_READ = 0


class NvmlUnavailable(Exception):
    """NVML cannot be used on this host, or failed on the way; the text says which and why."""


@dataclass(frozen=True)
class GpuReading:
    """One GPU now. ``utilization`` is a ratio of 0 to 1, ``temperature`` in degrees Celsius; ``clock_mhz``: of its
    multiprocessors; ``throttle``: the reasons that slow it now."""

    index: int
    total_bytes: int
    used_bytes: int
    utilization: float | None = None
    temperature: int | None = None
    watts: float | None = None
    power_limit_watts: float | None = None
    clock_mhz: int | None = None
    throttle: tuple[str, ...] = ()


@dataclass(frozen=True)
class GpuHealth(Gpu):
    """A GPU with what slows or breaks it. ``throttle``: the reasons that slow it now; ``remap_*``: the state of its
    memory row remapping; ``width``: PCIe lanes in use, ``width_max``: lanes that card and slot could use."""

    persistence: bool | None = None
    bar1_bytes: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    throttle: tuple[str, ...] | None = None
    power_limit_watts: float | None = None
    power_default_watts: float | None = None
    temperature: int | None = None
    width: int | None = None
    width_max: int | None = None


@dataclass(frozen=True)
class GpuProcess:
    """A process with memory on GPU ``gpu``. ``bytes`` None: the driver does not say (another PID namespace);
    ``container``: who manages it, as `container.container_of` says; ``ours``: started by this state directory."""

    gpu: int
    pid: int
    name: str
    bytes: int | None = None
    container: str | None = None
    ours: bool = False


@dataclass(frozen=True)
class PeerAccess:
    """Whether GPU ``a`` may read the memory of GPU ``b``, and NVML's reason when it may not."""

    a: int
    b: int
    ok: bool
    why: str = ""


def driver_too_old(version: str | None) -> bool:
    """True for a driver older than `MINIMUM_DRIVER`; False when its version cannot be read."""
    parts = _version(version or "")
    return bool(parts) and parts < _version(MINIMUM_DRIVER)


def inventory() -> tuple[tuple[Gpu, ...], str, str, frozenset[int]]:
    """Every GPU of this host, the driver's version, the newest CUDA version that it takes (``13.0``), and the indices
    of GPUs with an active NVLink. Raises NvmlUnavailable."""
    with _session() as nv:
        cuda = nv.nvmlSystemGetCudaDriverVersion_v2()
        handles = [nv.nvmlDeviceGetHandleByIndex(index) for index in range(nv.nvmlDeviceGetCount())]
        gpus = tuple(_gpu(nv, index, handle) for index, handle in enumerate(handles))
        linked = frozenset(index for index, handle in enumerate(handles) if _has_nvlink(nv, handle))
        return gpus, _text(nv.nvmlSystemGetDriverVersion()), f"{cuda // 1000}.{cuda % 1000 // 10}", linked


def peers(indices: Sequence[int]) -> bool | None:
    """Whether each of these GPUs may read the memory of each other; None when the driver does not say."""
    with contextlib.suppress(NvmlUnavailable), _session() as nv:
        found = _peers(nv, dict(_handles(nv, indices)))
        return all(pair.ok for pair in found) if found else None
    return None


def readings() -> tuple[GpuReading, ...]:
    """Memory and load of every GPU that answers."""
    found: list[GpuReading] = []
    with contextlib.suppress(NvmlUnavailable), _session() as nv:
        for index, handle in _handles(nv, range(nv.nvmlDeviceGetCount())):
            if memory := _ask(nv.nvmlDeviceGetMemoryInfo, handle):
                busy = _ask(nv.nvmlDeviceGetUtilizationRates, handle)
                heat = _ask(nv.nvmlDeviceGetTemperature, handle, nv.NVML_TEMPERATURE_GPU)
                load = None if busy is None else busy.gpu / 100
                watts = _watts(nv.nvmlDeviceGetPowerUsage, handle)
                limit = _watts(nv.nvmlDeviceGetPowerManagementLimit, handle)
                clock = _ask(nv.nvmlDeviceGetClockInfo, handle, nv.NVML_CLOCK_SM)
                slowed = _throttle(nv, _ask(nv.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0)
                sizes = int(memory.total), int(memory.used)
                found.append(GpuReading(index, *sizes, load, heat, watts, limit, clock, slowed))
    return tuple(found)


def free_bytes(indices: Sequence[int]) -> dict[int, int]:
    """Free memory by GPU index; a GPU that no longer answers is absent."""
    free: dict[int, int] = {}
    with contextlib.suppress(NvmlUnavailable), _session() as nv:
        for index, handle in _handles(nv, indices):
            if memory := _ask(nv.nvmlDeviceGetMemoryInfo, handle):
                free[index] = int(memory.free)
    return free


def processes(indices: Sequence[int]) -> tuple[GpuProcess, ...]:
    """The processes that hold memory on these GPUs for computing or for graphics."""
    found: list[GpuProcess] = []
    with contextlib.suppress(NvmlUnavailable), _session() as nv:
        for index, handle in _handles(nv, indices):
            held: dict[int, int | None] = {}
            for call in (nv.nvmlDeviceGetComputeRunningProcesses, nv.nvmlDeviceGetGraphicsRunningProcesses):
                held |= {int(one.pid): getattr(one, "usedGpuMemory", None) for one in _ask(call, handle) or ()}
            found += [GpuProcess(index, pid, _name(pid), int(used) if used else None) for pid, used in held.items()]
    return tuple(found)


def health(gpus: Sequence[Gpu]) -> tuple[tuple[GpuHealth, ...], tuple[PeerAccess, ...]]:
    """The health of ``gpus`` in their order, and which of them reach each other's memory."""
    plain = tuple(GpuHealth(**vars(gpu)) for gpu in gpus)
    if not plain:
        return (), ()
    try:
        with _session() as nv:
            handles = {gpu.index: nv.nvmlDeviceGetHandleByIndex(gpu.index) for gpu in gpus}
            return tuple(_health(nv, gpu, handles[gpu.index]) for gpu in gpus), _peers(nv, handles)
    except NvmlUnavailable:
        return plain, ()


@contextlib.contextmanager
def _session() -> Iterator[Any]:
    """The binding between nvmlInit and nvmlShutdown. Raises NvmlUnavailable."""
    import pynvml  # only here: 10 ms that most commands need not pay

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NvmlUnavailable(f"no NVIDIA driver that NVML can use: {error}") from None
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise NvmlUnavailable(f"NVML failed while reading the GPUs: {error}") from None
    finally:
        pynvml.nvmlShutdown()


def _ask(call: Callable[..., Any], *arguments: Any) -> Any:
    """What ``call`` returns, None when it is refused: by NVML, or by ctypes where binding and driver disagree."""
    try:
        return call(*arguments)
    except Exception:
        return None


def _handles(nv: Any, indices: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Index and handle of each of these GPUs that is still there."""
    for index in indices:
        if (handle := _ask(nv.nvmlDeviceGetHandleByIndex, index)) is not None:
            yield index, handle


def _gpu(nv: Any, index: int, handle: Any) -> Gpu:
    memory = nv.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nv.nvmlDeviceGetCudaComputeCapability(handle)
    bus = _text(nv.nvmlDeviceGetPciInfo(handle).busId).lower()
    return Gpu(
        index=index,
        name=_text(nv.nvmlDeviceGetName(handle)),
        sm=major * 10 + minor,
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        uuid=_text(nv.nvmlDeviceGetUUID(handle)),
        pci_bus_id=bus,
        numa_node=pci.numa_node(bus),
    )


def _health(nv: Any, gpu: Gpu, handle: Any) -> GpuHealth:
    remaps = _ask(nv.nvmlDeviceGetRemappedRows, handle)  # corrected, uncorrected, pending, failed
    reasons = _ask(nv.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    bar1 = _ask(nv.nvmlDeviceGetBAR1MemoryInfo, handle)
    mode = _ask(nv.nvmlDeviceGetPersistenceMode, handle)
    return GpuHealth(
        **vars(gpu),
        persistence=None if mode is None else bool(mode),
        bar1_bytes=None if bar1 is None else int(bar1.bar1Total),
        remap_pending=bool(remaps[2]) if remaps else None,
        remap_failed=bool(remaps[3]) if remaps else None,
        throttle=None if reasons is None else _throttle(nv, int(reasons)),
        power_limit_watts=_watts(nv.nvmlDeviceGetPowerManagementLimit, handle),
        power_default_watts=_watts(nv.nvmlDeviceGetPowerManagementDefaultLimit, handle),
        temperature=_ask(nv.nvmlDeviceGetTemperature, handle, nv.NVML_TEMPERATURE_GPU),
        width=_ask(nv.nvmlDeviceGetCurrPcieLinkWidth, handle),
        width_max=_ask(nv.nvmlDeviceGetMaxPcieLinkWidth, handle),
    )


def _throttle(nv: Any, reasons: int) -> tuple[str, ...]:
    return tuple(name for constant, name in _THROTTLE_REASONS.items() if reasons & getattr(nv, constant, 0))


def _peers(nv: Any, handles: dict[int, Any]) -> tuple[PeerAccess, ...]:
    found = []
    for a, b in permutations(handles, 2):
        status = _ask(nv.nvmlDeviceGetP2PStatus, handles[a], handles[b], _P2P_READ)
        if status is not None:
            found.append(PeerAccess(a, b, status == 0, _P2P_STATUS.get(status, "")))
    return tuple(found)


def _has_nvlink(nv: Any, handle: Any) -> bool:
    """True when any link of this GPU is up; links are counted from 0, and asking for one too many is refused."""
    try:
        links = range(nv.NVML_NVLINK_MAX_LINKS)
        return any(nv.nvmlDeviceGetNvLinkState(handle, link) == nv.NVML_FEATURE_ENABLED for link in links)
    except nv.NVMLError:
        return False


def _watts(call: Callable[..., Any], handle: Any) -> float | None:
    milliwatts = _ask(call, handle)
    return None if milliwatts is None else milliwatts / 1000


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())


def _name(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return "a process outside this container"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
