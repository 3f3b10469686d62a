"""What one node can see of an engine that ended: its log, the kernel's messages, exit codes, a stack dump of a hang."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..engine.log import Stage
from ..engine.run import Run
from ..host.kernel_log import KernelEvidence
from ..state.boots import Boot
from .launch import PlannedLaunch
from .monitors import Alarm

if TYPE_CHECKING:
    from ..healing.classify import Observed

# A stack dump takes about a second a process; a hung engine of eight ranks has ten of interest.
DUMPED_PROCESSES = 12
DUMP_TIMEOUT = 5.0
DUMP_LINES = 200
# A disk with less free than this many bytes counts as full: compilers and caches write files of some MiB.
FULL_BELOW = 16 << 20
# A GPU with less free than this many bytes can be out of memory: torch grows by segments of 2 MiB to some hundred MiB,
# and an activation of a prefill rarely has more than a GiB.
LOW_MEMORY = 1 << 30


@dataclass(frozen=True)
class FailedRun:
    """One run of the engine that ended. ``alarm``: why the supervisor ended it, None when it ended by itself.
    ``stacks``: lines of a stack dump taken before a hung engine was killed."""

    run: Run
    planned: PlannedLaunch
    boot: Boot
    alarm: Alarm | None
    stacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeEvidence:
    """What is seen of one node's end. ``at``: its first sign in monotonic seconds; ``own``: False when this node's
    engine was only ended because of another node, and was whole until then; ``alarm``: why the supervisor ended it."""

    node: int
    at: float
    own: bool
    lines: Sequence[str]
    observed: Observed
    exit_code: int | None
    alarm: str | None
    stages: Mapping[str, float]
    readings: Mapping[str, Mapping[str, float]]


def load_classifier() -> None:
    """Import what naming a cause needs. It takes a second, during which a crash would keep probes waiting: called
    from a thread soon after the first spawn."""
    from ..healing import classify, engine_config, playbook  # noqa: F401
    from ..healing.causes import catalogue

    catalogue()


async def collect(failed: FailedRun) -> NodeEvidence:
    """Return what this node saw of the end of its engine. Reads the kernel log and asks the driver, in threads."""
    await asyncio.to_thread(load_classifier)
    run, alarm = failed.run, failed.alarm
    kernel = await asyncio.to_thread(run.kernel_evidence.read, run.engine.tree.ever)
    lines = [*run.lines, *kernel.lines]
    if alarm is not None and not (alarm.hang or alarm.canary or alarm.group):
        lines.append(alarm.reason)
    return NodeEvidence(
        node=failed.planned.loaded.settings.node_rank,
        at=run.failure_started_at or time.monotonic(),
        own=alarm is None or not alarm.group or run.engine.failing,
        lines=lines,
        observed=await asyncio.to_thread(_observe, failed, kernel),
        exit_code=run.exit_code,
        alarm=alarm.reason if alarm else None,
        stages={name: round(seconds, 3) for name, seconds in run.stage_seconds().items()},
        readings={name: {str(rank): v for rank, v in ranks.items()} for name, ranks in run.readings.items()},
    )


def _observe(failed: FailedRun, kernel: KernelEvidence) -> Observed:
    """The facts beside the log. Blocking."""
    from ..healing.classify import Observed
    from ..host import nvml

    code = failed.run.exit_code
    alarm = failed.alarm
    gpus = [gpu.index for gpu in failed.planned.inventory.gpus]
    return Observed(
        exit_code=code if code is not None and code >= 0 else None,
        signal=-code if code is not None and code < 0 else None,
        hang=alarm.hang if alarm else None,
        stopped=alarm is not None and alarm.stopped,
        canary=alarm.canary if alarm else None,
        stage=Stage(failed.run.stage).catalogue,
        oom_kill=kernel.oom_kill,
        xids=kernel.xids,
        gpus_missing=len(nvml.free_bytes(gpus)) < len(gpus),
        exposed=failed.boot.ready_at is not None or failed.run.exposed,
        disk_full=any(
            map(is_full, (failed.planned.loaded.settings.state_dir, failed.planned.loaded.settings.cache_dir))
        ),
        survived=failed.run.survived(),
        gpu_memory_low=failed.run.gpu_free_bytes is not None and failed.run.gpu_free_bytes < LOW_MEMORY,
    )


def is_full(directory: Path) -> bool:
    """Return True when nothing can be written to the disk of ``directory``: bytes or inodes are used up."""
    try:
        disk = os.statvfs(directory)
    except OSError as error:
        return error.errno == errno.ENOSPC
    return disk.f_bavail * disk.f_frsize < FULL_BELOW or (disk.f_files > 0 and disk.f_favail == 0)


async def dump_stacks(run: Run) -> tuple[str, ...]:
    """Return where every process of a hung engine stands, as lines of py-spy; nothing where py-spy is absent."""
    tool = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if tool is None:
        return ()
    lines: list[str] = []
    for process in run.engine.tree.vital()[:DUMPED_PROCESSES]:
        child = await asyncio.create_subprocess_exec(
            *(tool, "dump", "--nonblocking", "--pid", str(process.pid)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await asyncio.wait_for(child.communicate(), DUMP_TIMEOUT)
            lines += run.scrub(output.decode("utf-8", "replace")).splitlines()[:DUMP_LINES]
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    return tuple(lines)
