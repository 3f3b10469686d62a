"""The box: GPUs (NVML), driver, links, host memory. Read once, or from a recorded inventory file.

Nothing else in relaunch asks NVML what the box is; the file that `relaunch hardware --json` prints and
`RELAUNCH_GPU_INVENTORY` reads is this record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import unreadable
from ..units import MIB

# The way out of a refusal for want of GPUs, in every verb.
PLAN_ELSEWHERE = (
    "to plan for a box that has them, run `relaunch hardware --json > box.json` there and set "
    "RELAUNCH_GPU_INVENTORY=box.json here"
)


@dataclass(frozen=True)
class Gpu:
    """One GPU. Sizes in bytes; ``sm`` is compute capability times ten (120 = 12.0)."""

    index: int
    name: str
    sm: int
    total_bytes: int
    free_bytes: int
    uuid: str | None = None
    pci_bus_id: str | None = None
    numa_node: int | None = None


@dataclass(frozen=True)
class Inventory:
    """What the planner knows of a box. ``nvlink``: every GPU pair is linked by NVLink."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    host_memory_bytes: int = 0
    nvlink: bool = False
    cpu_count: int = 1
    recorded: bool = False
    notes: tuple[str, ...] = field(default=())

    def document(self) -> dict[str, Any]:
        """The inventory file."""
        document = asdict(self)
        del document["recorded"]
        document["gpus"] = [{k: v for k, v in asdict(gpu).items() if v is not None} for gpu in self.gpus]
        document["notes"] = list(self.notes)
        return document


def current(recorded: Path | None, environ: Mapping[str, str]) -> Inventory:
    """The inventory recorded in the file ``recorded`` when one is given, else this host, with the GPUs that
    ``CUDA_VISIBLE_DEVICES`` of ``environ`` leaves visible. Raises Stop (66) for a file that cannot be used."""
    return load(recorded) if recorded is not None else read(environ.get("CUDA_VISIBLE_DEVICES"))


def load(path: Path) -> Inventory:
    """A recorded inventory. Raises Stop (66) in one line when it is absent or not of the documented form."""
    fix = "record one with `relaunch hardware --json` on the box"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        gpus = tuple(
            Gpu(
                index=int(row["index"]),
                name=_printable(row["name"]),
                sm=int(row["sm"]),
                total_bytes=int(row["total_bytes"]),
                free_bytes=int(row.get("free_bytes", row["total_bytes"])),
                uuid=row.get("uuid"),
                pci_bus_id=row.get("pci_bus_id"),
                numa_node=row.get("numa_node"),
            )
            for row in data["gpus"]
        )
        inventory = Inventory(
            gpus=gpus,
            driver=_printable(data.get("driver")) or None,
            cuda=_printable(data.get("cuda")) or None,
            host_memory_bytes=int(data.get("host_memory_bytes") or 0),
            nvlink=data.get("nvlink", False),
            cpu_count=int(data.get("cpu_count") or 1),
            recorded=True,
        )
    except OSError as error:
        raise unreadable(f"RELAUNCH_GPU_INVENTORY={path} cannot be read: {error.strerror}", fix) from None
    except KeyError as error:
        raise unreadable(f"RELAUNCH_GPU_INVENTORY={path} lacks {error}", fix) from None
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise unreadable(f"RELAUNCH_GPU_INVENTORY={path} is not an inventory: {error}", fix) from None
    if not isinstance(inventory.nvlink, bool):
        raise unreadable(f"RELAUNCH_GPU_INVENTORY={path}: nvlink is neither true nor false", fix)
    if inventory.host_memory_bytes < 0 or inventory.cpu_count < 0:
        raise unreadable(f"RELAUNCH_GPU_INVENTORY={path}: host_memory_bytes or cpu_count is negative", fix)
    for gpu in gpus:
        if gpu.index < 0 or not 30 <= gpu.sm <= 200:
            problem = f"GPU {gpu.index} has sm {gpu.sm}: compute capability times ten is meant, such as 120 for 12.0"
            raise unreadable(f"RELAUNCH_GPU_INVENTORY={path}: {problem}", fix)
        if not MIB * 256 <= gpu.total_bytes <= 1 << 44:
            raise unreadable(f"RELAUNCH_GPU_INVENTORY={path}: GPU {gpu.index} has total_bytes {gpu.total_bytes}", fix)
        if not 0 <= gpu.free_bytes <= gpu.total_bytes:
            raise unreadable(
                f"RELAUNCH_GPU_INVENTORY={path}: GPU {gpu.index} has free_bytes outside 0..total_bytes", fix
            )
    if len({gpu.index for gpu in gpus}) != len(gpus):
        raise unreadable(f"RELAUNCH_GPU_INVENTORY={path}: two GPUs share an index", fix)
    return inventory


def read(visible: str | None = None) -> Inventory:
    """The box that this process runs on; ``visible`` is CUDA_VISIBLE_DEVICES. Never raises: a box whose
    NVML cannot be used has no GPUs and a note that says why."""
    import os

    from . import memory

    gpus, driver, cuda, nvlink, note = _read_nvml(visible)
    return Inventory(
        gpus=gpus,
        driver=driver,
        cuda=cuda,
        host_memory_bytes=memory.total_bytes(),
        nvlink=nvlink,
        cpu_count=len(os.sched_getaffinity(0)),
        notes=(note,) if note else (),
    )


def _read_nvml(visible: str | None) -> tuple[tuple[Gpu, ...], str | None, str | None, bool, str | None]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), None, None, False, f"no NVIDIA driver that NVML can use: {error}"
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        cuda = f"{version // 1000}.{version % 1000 // 10}"
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        gpus = [_read_gpu(i, handle) for i, handle in enumerate(handles)]
        chosen = _visible(gpus, visible)
        nvlink = len(chosen) > 1 and all(_has_nvlink(handles[gpu.index]) for gpu in chosen)
        return tuple(chosen), driver, cuda, nvlink, None
    except pynvml.NVMLError as error:
        return (), None, None, False, f"NVML failed while reading the GPUs: {error}"
    finally:
        pynvml.nvmlShutdown()


def _read_gpu(index: int, handle: Any) -> Gpu:
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    bus = _text(pynvml.nvmlDeviceGetPciInfo(handle).busId).lower()
    return Gpu(
        index=index,
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        sm=major * 10 + minor,
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        pci_bus_id=bus,
        numa_node=_numa_node(bus),
    )


def _visible(gpus: list[Gpu], visible: str | None) -> list[Gpu]:
    """CUDA_VISIBLE_DEVICES as CUDA reads it: indices or UUID prefixes, ending at the first unknown one."""
    if visible is None:
        return gpus
    chosen: list[Gpu] = []
    for word in (part.strip() for part in visible.split(",")):
        if word.isdecimal():
            match = [gpu for gpu in gpus if gpu.index == int(word)]
        else:
            match = [gpu for gpu in gpus if word and (gpu.uuid or "").startswith(word)]
        if len(match) != 1 or match[0] in chosen:
            break
        chosen.append(match[0])
    return chosen


def _has_nvlink(handle: Any) -> bool:
    import pynvml

    try:
        return any(
            pynvml.nvmlDeviceGetNvLinkState(handle, link) == pynvml.NVML_FEATURE_ENABLED
            for link in range(pynvml.NVML_NVLINK_MAX_LINKS)
        )
    except pynvml.NVMLError:
        return False


def _numa_node(bus: str) -> int | None:
    # NVML writes an eight-digit PCI domain, sysfs a four-digit one.
    try:
        node = int(Path(f"/sys/bus/pci/devices/{bus[-12:]}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _printable(value: Any) -> str:
    """Text for a terminal: one line, nothing that steers it."""
    return "".join(c for c in str(value or "") if c.isprintable())[:200]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
