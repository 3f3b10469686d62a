"""What the planner knows of a host: GPUs, driver, links, memory, and the file that holds it.

The file that `relaunch hardware --json` prints and `RELAUNCH_GPU_INVENTORY` reads is this record.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import unreadable
from ..units import GIB, MIB

# What a recorded GPU may have: compute capability 3.0 to 20.0, 256 MiB to 16 TiB. Outside is a slip of the pen.
SM_RANGE = (30, 200)
MEMORY_RANGE = (256 * MIB, 16384 * GIB)

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
    """A host. ``nvlink``: every GPU has an active NVLink; ``peers``: every GPU may read the memory of every other, None
    where that is not known; ``recorded``: read from a file, so not the host that this
    process runs on; ``notes``: why something could not be read."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    host_memory_bytes: int = 0
    nvlink: bool = False
    peers: bool | None = None
    cpu_count: int = 1
    recorded: bool = False
    notes: tuple[str, ...] = field(default=())

    def document(self) -> dict[str, Any]:
        """The content of the inventory file."""
        document = asdict(self)
        del document["recorded"]
        document["gpus"] = [{k: v for k, v in asdict(gpu).items() if v is not None} for gpu in self.gpus]
        document["notes"] = list(self.notes)
        return document


def load(path: Path) -> Inventory:
    """A recorded inventory. Raises Stop (66) in one line when it is absent or not of the documented form."""
    where, fix = f"RELAUNCH_GPU_INVENTORY={path}", "record one with `relaunch hardware --json` on the box"
    try:
        inventory = _parse(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise unreadable(f"{where} cannot be read: {error.strerror}", fix) from None
    except KeyError as error:
        raise unreadable(f"{where} lacks {error}", fix) from None
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise unreadable(f"{where} is not an inventory: {error}", fix) from None
    if (problem := _problem(inventory)) is not None:
        raise unreadable(f"{where}: {problem}", fix)
    return inventory


def _parse(data: dict[str, Any]) -> Inventory:
    """The record of a JSON document. Raises what its missing and misformed fields raise."""
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
    return Inventory(
        gpus=gpus,
        driver=_printable(data.get("driver")) or None,
        cuda=_printable(data.get("cuda")) or None,
        host_memory_bytes=int(data.get("host_memory_bytes") or 0),
        nvlink=data.get("nvlink", False),
        peers=data.get("peers"),
        cpu_count=int(data.get("cpu_count") or 1),
        recorded=True,
    )


def _problem(inventory: Inventory) -> str | None:
    """Why this cannot be a host, or None."""
    if not isinstance(inventory.nvlink, bool):
        return "nvlink is neither true nor false"
    if inventory.peers not in (True, False, None):
        return "peers is neither true nor false nor null"
    if inventory.host_memory_bytes < 0 or inventory.cpu_count < 0:
        return "host_memory_bytes or cpu_count is negative"
    for gpu in inventory.gpus:
        if gpu.index < 0 or not SM_RANGE[0] <= gpu.sm <= SM_RANGE[1]:
            return f"GPU {gpu.index} has sm {gpu.sm}: compute capability times ten is meant, such as 120 for 12.0"
        if not MEMORY_RANGE[0] <= gpu.total_bytes <= MEMORY_RANGE[1]:
            return f"GPU {gpu.index} has total_bytes {gpu.total_bytes}"
        if not 0 <= gpu.free_bytes <= gpu.total_bytes:
            return f"GPU {gpu.index} has free_bytes outside 0..total_bytes"
    if len({gpu.index for gpu in inventory.gpus}) != len(inventory.gpus):
        return "two GPUs share an index"
    return None


def _printable(value: Any) -> str:
    """Text for a terminal: one line, nothing that steers it."""
    return "".join(c for c in str(value or "") if c.isprintable())[:200]
