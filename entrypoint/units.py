"""Durations, sizes and times as people write them: ``30``, ``30s``, ``5m``; ``8GiB``, ``512MiB``; RFC 3339."""

from __future__ import annotations

import re
from datetime import UTC, datetime

GIB = 1 << 30
MIB = 1 << 20

_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def utc(timestamp: float) -> str:
    """Seconds since the epoch as RFC 3339 in UTC, with milliseconds."""
    return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_duration(text: str | int | float) -> float:
    """Seconds from ``30``, ``30s``, ``5m``, ``1h30m``. Raises ValueError."""
    return _parse(text, _SECONDS, "a duration such as 30, 30s, 5m or 1h30m")


def parse_size(text: str | int | float) -> int:
    """Bytes from ``8GiB``, ``512MiB``, ``2GB`` or a plain number. Raises ValueError."""
    return int(_parse(text, _BYTES, "a size such as 8GiB or 512MiB"))


def _parse(text: str | int | float, units: dict[str, float] | dict[str, int], wanted: str) -> float:
    if isinstance(text, bool):
        raise ValueError(f"expected {wanted}")
    if isinstance(text, int | float):
        total = float(text)
    else:
        total, position = 0.0, 0
        text = text.strip()
        while position < len(text):
            match = _PART.match(text, position)
            if not match or match[2].lower() not in units:
                raise ValueError(f"expected {wanted}")
            total += float(match[1]) * units[match[2].lower()]
            position = match.end()
        if not text:
            raise ValueError(f"expected {wanted}")
    if not 0 <= total < float("inf"):
        raise ValueError(f"expected {wanted}, not negative")
    return total


def format_duration(seconds: float) -> str:
    """``0.4s``, ``12s``, ``3m05s``, ``1h02m``."""
    if seconds < 10:
        return f"{seconds:.1f}s".replace(".0s", "s")
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def format_bytes(count: float) -> str:
    """Binary units with two decimals from GiB on: ``56.04 GiB``, ``512 MiB``."""
    for unit, size in (("TiB", 1 << 40), ("GiB", GIB)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    for unit, size in (("MiB", MIB), ("KiB", 1 << 10)):
        if abs(count) >= size:
            return f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"
