"""What an earlier supervisor of the same state directory left: processes with its mark, shared memory of its record."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from ..host.shm import ShmLedger
from . import process

# A leftover that would not die in this many seconds is left to the checks that follow.
PATIENCE = 30.0


def mark_of(state_dir: Path) -> str:
    """What the marks of all runs of this state directory begin with."""
    where = os.fsencode(state_dir.resolve())
    return hashlib.sha256(where).hexdigest()[:12] + "-"


def end(state_dir: Path, warn: Callable[[str], None]) -> None:
    """End them. That supervisor must be dead: the caller holds its lock. Blocking."""
    deadline = time.monotonic() + PATIENCE
    said: set[int] = set()
    while (orphans := process.leftovers(mark_of(state_dir))) and time.monotonic() < deadline:
        for orphan in orphans:
            if orphan.pid not in said:
                said.add(orphan.pid)
                warn(f"ending a leftover of an earlier supervisor: pid {orphan.pid}")
            with contextlib.suppress(psutil.Error):
                orphan.kill()
        # A big process keeps its port and its GPU memory until it is really gone.
        psutil.wait_procs(orphans, timeout=1.0)
    for name in ShmLedger.of_record(state_dir / "run" / "shm.json").remove():
        warn(f"removed /dev/shm/{name}, left by an earlier supervisor")
