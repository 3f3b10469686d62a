"""Remove a bad file at its real place, so that fetching it again gives new bytes."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import Stop
from . import faults, hashing, layout, locks
from .common import FileState, Located
from .environment import Hub


def remove(hub: Hub, located: Located, bad: Sequence[FileState]) -> list[str]:
    """Remove the damaged files of ``bad``; the paths removed. A file that another process has replaced meanwhile
    stays. Raises Stop when the cache cannot be written or another process keeps a file's lock."""
    assert located.path is not None and located.storage is not None
    removed = []
    for state in bad:
        place = located.path / state.path
        hops = layout.real_places(place)
        if not hops:
            continue
        lock = locks.lock_path(hub.cache, located.storage, layout.first_hop(place) or "none")
        with locks.held(lock, 30.0) as mine:
            if not mine:
                raise Stop(
                    "download_stalled",
                    f"{state.path} is bad, and another process keeps its lock {lock}",
                    "wait for that process, or stop it",
                )
            try:
                if state.identity is not None and hashing.identity(place.stat()) != state.identity:
                    continue
            except OSError:
                pass
            try:
                for hop in hops:
                    hop.unlink(missing_ok=True)
            except OSError as error:
                raise faults.from_os_error(error, hop, hub.setting) from None
        removed.append(state.path)
    return removed
