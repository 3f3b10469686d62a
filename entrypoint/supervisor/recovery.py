"""Between two engines: damaged files repaired, stale kernels removed, GPU memory back, ports free."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ..engine import command
from ..errors import Stop
from ..host import ports
from ..units import MIB, format_duration
from .launch import PlannedLaunch
from .logs import Log

# Free GPU memory may come back this much short of what it was and still count as back.
MEMORY_SLACK = 512 * MIB
# Our own memory comes back in seconds; where another process holds it, the operator gets the start-up's time.
MEMORY_TIMEOUT = 120.0
# Seconds between two log lines about who holds the memory.
HOLDERS_LOGGED_EVERY = 10.0
# A connection in TIME_WAIT or a process in the driver keeps a port this long at the most.
PORT_TIMEOUT = 30.0


@dataclass(frozen=True)
class Recovery:
    """What must be done before the next start. ``repair``: checkpoint files to fetch again; empty: whatever a full
    check finds; None: nothing. ``wait_for_memory``: give another process the time of a start to free GPU memory."""

    repair: tuple[str, ...] | None = None
    clear_jit_cache: bool = False
    wait_for_memory: bool = False


async def recover(planned: PlannedLaunch, recovery: Recovery, environ: Mapping[str, str], log: Log) -> None:
    """Do what ``recovery`` asks for and wait until an engine can be started. Raises Stop when a GPU is lost, its
    memory does not come back, or the repair fails."""
    settings = planned.loaded.settings
    timeout = settings.startup_timeout if recovery.wait_for_memory else MEMORY_TIMEOUT
    await _gpu_memory_back(planned.free_before, timeout, log)
    if recovery.repair is not None:
        from .. import weights

        log.info(f"repairing {', '.join(recovery.repair) or 'what a full check finds'}")
        await weights.repair(planned.loaded, recovery.repair or None, environ=environ)
    if recovery.clear_jit_cache:
        await _remove_kernels(planned, log)
    began = time.monotonic()
    while not ports.is_free(settings.host, settings.port) and time.monotonic() - began < PORT_TIMEOUT:
        await asyncio.sleep(0.2)


async def _remove_kernels(planned: PlannedLaunch, log: Log) -> None:
    import shutil

    from ..kernels import kernels

    for place in (
        command.jit_cache(planned.loaded, planned.inventory),
        kernels.directory(planned.loaded.settings.cache_dir),
    ):
        log.info(f"removing compiled kernels and tuning results: {place}")
        await asyncio.to_thread(shutil.rmtree, place, True)


async def _gpu_memory_back(free_before: Mapping[int, int], timeout: float, log: Log) -> None:
    """Wait until every GPU has as many free bytes as before the first spawn."""
    from ..host import nvml

    began = logged = time.monotonic()
    while free_before:
        free = await asyncio.to_thread(nvml.free_bytes, list(free_before))
        lost = [index for index in free_before if index not in free]
        if lost:
            raise Stop("gpu_lost", f"GPU {lost[0]} no longer answers", "reset the GPU or reboot, see dmesg for Xid")
        short = [index for index, before in free_before.items() if free[index] < before - MEMORY_SLACK]
        if not short:
            break
        now = time.monotonic()
        timed_out = now - began > timeout
        if timed_out or now - logged > HOLDERS_LOGGED_EVERY:
            logged = now
            holders = await asyncio.to_thread(nvml.processes, short)
            names = ", ".join(f"{h.name} (pid {h.pid})" for h in holders) or "nobody that the driver names"
            log.warning(f"GPU {short[0]} memory is still held by {names}")
            if timed_out:
                raise Stop(
                    "memory_unbalanced",
                    f"the memory of GPU {short} did not come back within {format_duration(timeout)}: {names}",
                    "end that process; it is not ours",
                    exit_code=70,
                )
        await asyncio.sleep(0.1)
