"""A recorded root directory, for the probes that read /proc and /sys below a ``root``."""

from __future__ import annotations

from pathlib import Path


def tree(root: Path, files: dict[str, str | bytes]) -> Path:
    """Write ``files`` (path below ``root``: content) and return ``root``."""
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return root
