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
from .tree import is_alive, is_marked

# A leftover that would not die in this many seconds is left to the checks that follow.
KILL_TIMEOUT = 30.0


def mark_of(state_dir: Path) -> str:
    """Return what the run ids of this state directory begin with."""
    where = os.fsencode(state_dir.resolve())
    return hashlib.sha256(where).hexdigest()[:12] + "-"


def run_id(state_dir: Path, number: int) -> str:
    """Return the mark of this supervisor's run ``number``."""
    return f"{mark_of(state_dir)}{os.getpid()}-{number}"


def run_directory(state_dir: Path) -> Path:
    """Return the working directory of all engines of this state directory."""
    return state_dir / "run"


def belongs_to(pid: int, state_dir: Path) -> bool:
    """Return True when process ``pid`` is of an engine that a supervisor of ``state_dir`` started."""
    return is_marked(pid, mark_of(state_dir), run_directory(state_dir))


def find(state_dir: Path) -> list[psutil.Process]:
    """Return the living processes of earlier runs. Reads /proc once."""
    return [p for p in psutil.process_iter() if p.pid != os.getpid() and belongs_to(p.pid, state_dir) and is_alive(p)]


def end(state_dir: Path, warn: Callable[[str], None]) -> None:
    """End them. That supervisor must be dead: the caller holds its lock. Blocking."""
    deadline = time.monotonic() + KILL_TIMEOUT
    warned: set[int] = set()
    while (orphans := find(state_dir)) and time.monotonic() < deadline:
        for orphan in orphans:
            if orphan.pid not in warned:
                warned.add(orphan.pid)
                warn(f"ending a leftover of an earlier supervisor: pid {orphan.pid}")
            with contextlib.suppress(psutil.Error):
                orphan.kill()
        # A big process keeps its port and its GPU memory until it is really gone.
        psutil.wait_procs(orphans, timeout=1.0)
    for record in run_directory(state_dir).glob("shm*.json"):
        for name in ShmLedger.of_record(record).remove():
            warn(f"removed /dev/shm/{name}, left by an earlier supervisor")
