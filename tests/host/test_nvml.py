"""What NVML says and what it refuses: GPUs, health, tenants. The binding is the real one, its calls are replaced."""

from __future__ import annotations

import os
from typing import Any

import pynvml
import pytest

from entrypoint.host import discover, nvml
from entrypoint.host.inventory import Gpu

GIB = 1 << 30
GPUS = tuple(Gpu(i, "X", 120, 96 * GIB, 95 * GIB) for i in range(2))


def record(**fields: Any) -> Any:
    """An object with these attributes, as the binding's structures are."""
    return type("Record", (), fields)


ANSWERS: dict[str, Any] = {
    "nvmlDeviceGetRemappedRows": (1, 0, 1, 0),
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x40 | 0x4,
    "nvmlDeviceGetPowerManagementLimit": 450_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 600_000,
    "nvmlDeviceGetPowerUsage": 410_500,
    "nvmlDeviceGetPersistenceMode": 0,
    "nvmlDeviceGetBAR1MemoryInfo": record(bar1Total=128 * GIB),
    "nvmlDeviceGetCurrPcieLinkWidth": 8,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetUtilizationRates": record(gpu=40),
    "nvmlDeviceGetComputeRunningProcesses": [record(pid=os.getpid(), usedGpuMemory=5 * GIB)],
    "nvmlDeviceGetGraphicsRunningProcesses": [record(pid=2**22 + 1, usedGpuMemory=None)],
    "nvmlDeviceGetName": b"NVIDIA X",
    "nvmlDeviceGetUUID": "GPU-abc",
    "nvmlDeviceGetCudaComputeCapability": (12, 0),
    "nvmlDeviceGetPciInfo": record(busId=b"00000000:FF:1F.0"),
}


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs; the second one answers NOT_SUPPORTED to everything but memory."""

    def only_first(handle: int, answer: Any) -> Any:
        if handle:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return answer

    def handle(index: int) -> int:
        if index > 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    for name in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    memory = record(total=96 * GIB, used=6 * GIB, free=90 * GIB)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: memory)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTemperature", lambda handle, _: only_first(handle, 61))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", lambda handle, _: only_first(handle, 2325))
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "580.95.05")
    monkeypatch.setattr(pynvml, "nvmlSystemGetCudaDriverVersion_v2", lambda: 13000)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetNvLinkState", lambda handle, link: only_first(handle, 1))
    # As ctypes does: an index that is no number is refused.
    monkeypatch.setattr(pynvml, "nvmlDeviceGetP2PStatus", lambda a, b, index: index + (0 if a < b else 1))
    for name, answer in ANSWERS.items():
        monkeypatch.setattr(pynvml, name, lambda handle, answer=answer: only_first(handle, answer))


@pytest.mark.usefixtures("two_gpus")
def test_health_is_what_each_gpu_says_and_none_where_it_refuses() -> None:
    (first, second), peers = nvml.health(GPUS)
    assert (first.persistence, first.remap_pending, first.remap_failed) == (False, True, False)
    assert first.throttle == ("hw_thermal_slowdown", "sw_power_cap")
    assert (first.power_limit_watts, first.power_default_watts, first.temperature) == (450.0, 600.0, 61)
    assert (first.width, first.width_max, first.bar1_bytes) == (8, 16, 128 * GIB)
    assert (second.persistence, second.remap_pending, second.throttle, second.width) == (None, None, None, None)
    assert [(p.a, p.b, p.ok, p.why) for p in peers] == [(0, 1, True, ""), (1, 0, False, "chipset not supported")]


@pytest.mark.usefixtures("two_gpus")
def test_processes_of_compute_and_of_graphics_are_tenants() -> None:
    ours, outside = nvml.processes([0, 1])
    assert (ours.gpu, ours.pid, ours.bytes) == (0, os.getpid(), 5 * GIB)
    assert (outside.name, outside.bytes) == ("a process outside this container", None)


@pytest.mark.usefixtures("two_gpus")
def test_a_lost_gpu_is_absent_from_the_free_memory() -> None:
    assert nvml.free_bytes([0, 1, 2]) == {0: 90 * GIB, 1: 90 * GIB}


@pytest.mark.usefixtures("two_gpus")
def test_the_load_has_gaps_where_the_driver_is_silent() -> None:
    first, second = nvml.readings()
    assert (first.utilization, first.temperature, first.watts) == (0.4, 61, 410.5)
    assert (first.power_limit_watts, first.clock_mhz) == (450.0, 2325)
    assert first.throttle == ("hw_thermal_slowdown", "sw_power_cap")
    assert (second.used_bytes, second.utilization, second.watts) == (6 * GIB, None, None)
    assert (second.power_limit_watts, second.clock_mhz, second.throttle) == (None, None, ())


def test_the_inventory_of_this_host(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Name", "UUID", "CudaComputeCapability", "PciInfo"):
        answer = ANSWERS[f"nvmlDeviceGet{name}"]
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", lambda handle, answer=answer: answer)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: f"GPU-{handle}")
    box = discover.read()
    assert [(gpu.index, gpu.name, gpu.sm, gpu.uuid) for gpu in box.gpus] == [
        (0, "NVIDIA X", 120, "GPU-0"),
        (1, "NVIDIA X", 120, "GPU-1"),
    ]
    assert (box.driver, box.cuda, box.nvlink, box.notes) == ("580.95.05", "13.0", False, ())
    assert [gpu.index for gpu in discover.read("GPU-1,0,7,1").gpus] == [1, 0]
    assert discover.read("").gpus == ()


@pytest.mark.usefixtures("two_gpus")
def test_a_refusal_while_the_gpus_are_read_is_a_note() -> None:
    box = discover.read()
    assert box.gpus == () and box.notes[0].startswith("NVML failed while reading the GPUs: ")
    assert box.host_memory_bytes > 0 and box.cpu_count > 0


def test_without_a_driver_there_is_nothing_and_a_note_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    assert (nvml.readings(), nvml.free_bytes([0]), nvml.processes([0])) == ((), {}, ())
    (health, _), peers = nvml.health(GPUS)
    assert (health.index, health.persistence, peers) == (0, None, ())
    assert discover.read().notes[0].startswith("no NVIDIA driver that NVML can use: ")


@pytest.mark.parametrize(
    ("version", "old"),
    [("570.133.20", True), ("580.65.05", True), ("580.65.06", False), ("591.1", False), (None, False)],
)
def test_the_oldest_driver_for_the_engine_s_cuda(version: str | None, old: bool) -> None:
    assert nvml.driver_too_old(version) is old
