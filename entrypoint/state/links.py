"""`links.json`: what the links of this box were measured to do, until its GPUs are others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import from_os_error
from ..host.inventory import Inventory
from ..json_store import read_json, write_json


def _gpus(box: Inventory) -> list[list[Any]]:
    return [[gpu.name, gpu.pci_bus_id] for gpu in box.gpus]


def read(state_dir: Path, box: Inventory) -> dict[str, Any] | None:
    """Return what was measured on these GPUs (`tuning/links.py`), None when nothing was."""
    document = read_json(state_dir / "links.json")
    if document is None or document.get("gpus") != _gpus(box) or not isinstance(document.get("measured"), dict):
        return None
    return dict(document["measured"])


def write(state_dir: Path, box: Inventory, measured: dict[str, Any]) -> None:
    """Keep what was measured. Raises Stop."""
    path = state_dir / "links.json"
    try:
        write_json(path, {"gpus": _gpus(box), "measured": measured})
    except OSError as error:
        raise from_os_error(error, path, "RELAUNCH_STATE_DIR") from None
