"""How much the page cache may hold here."""

from __future__ import annotations

from pathlib import Path

_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def cgroup_limit(places: tuple[str, ...] = _CGROUPS) -> int | None:
    """Bytes of memory that the container may use; None: no limit."""
    for place in places:
        try:
            text = Path(place).read_text().strip()
        except OSError:
            continue
        # The old form of "no limit" is a number near 2**63.
        if text.isdecimal() and int(text) < 1 << 60:
            return int(text)
    return None


def available_memory() -> int:
    """Bytes that could be had now, under the container's limit; 0 when that cannot be said."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) << 10
                return min(available, cgroup_limit() or available)
    except (OSError, ValueError):
        pass
    return 0
