"""Processes that run only on time that nothing else wants (SCHED_IDLE of sched(7)), and their way back.

Leaving that policy needs CAP_SYS_NICE or a limit of niceness (RLIMIT_NICE): who has neither may not enter it.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterable
from pathlib import Path

_CAP_SYS_NICE = 23  # linux/capability.h
# RLIMIT_NICE counts from 20 (niceness 0) to 40 (niceness -20).
_NICENESS_ZERO = 20


def can_restore() -> bool:
    """Return True when this process may take a process of its own user out of the policy again."""
    limit = resource.getrlimit(resource.RLIMIT_NICE)[0]
    if limit == resource.RLIM_INFINITY or limit >= _NICENESS_ZERO:
        return True
    status = Path("/proc/self/status").read_text()
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_SYS_NICE & 1)


def lower(pid: int) -> bool:
    """Let ``pid``, which has one thread so far, and all that it will start run at idle priority. Return whether it
    does."""
    with contextlib.suppress(OSError):
        if can_restore():
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
            return True
    return False


def restore(pids: Iterable[int]) -> None:
    """Give every thread of ``pids`` the usual policy back."""
    for pid in pids:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError):
                    os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))
