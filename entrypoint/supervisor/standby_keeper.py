"""Decides about the standby (RELAUNCH_STANDBY=on): when one is prepared, whether it fits the next start, when it goes.

Whatever is odd about it means a start without it, which is what happens without the setting too.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..control.status import Status
from ..engine import command, leftovers, scratch
from ..engine.process import Engine
from ..engine.standby import Standby
from ..errors import Stop
from ..host.memory import available_bytes
from ..plan.run import STANDBY_PROCESS_BYTES
from ..units import format_bytes, format_duration
from .launch import PlannedLaunch
from .logs import Log

# Its imports take 30 s one after another on a free core; on a busy host it may wait for a core.
PREPARE_TIMEOUT = 900.0


@dataclass(frozen=True)
class Identity:
    """What a standby and a start must have in common: everything that decides what the engine becomes."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    packages: frozenset[tuple[str, float]]

    def differences(self, other: Identity) -> list[str]:
        """Return the names of what differs. No values: an environment holds secrets."""
        differ = ["arguments"] if self.argv != other.argv else []
        differ += sorted(k for k in self.env.keys() | other.env.keys() if self.env.get(k) != other.env.get(k))
        return differ + (["packages"] if self.packages != other.packages else [])


class StandbyKeeper:
    """Keeps at most one standby. ``sessions``: the sessions of all engines of this supervisor, see `ProcessTree`."""

    def __init__(
        self,
        environ: Mapping[str, str],
        log: Log,
        status: Status,
        sessions: set[int],
        make: type[Standby] = Standby,
    ) -> None:
        self._environ, self._log, self._status, self._sessions, self._make = environ, log, status, sessions, make
        self._standby: Standby | None = None
        self._identity: Identity | None = None
        self._scratch = Path()
        self._preparing: asyncio.Task[None] | None = None

    def prepare(self, number: int, planned: PlannedLaunch, serving: Engine) -> None:
        """Begin to prepare the engine that would be spawn ``number``, if none is there. ``serving``: the engine that
        serves, which tells how many processes there will be."""
        children = len([pid for pid in serving.tree.known if pid in serving.tree.titles])
        if self._preparing is None and self._allowed(planned, children):
            self._preparing = asyncio.create_task(self._prepare(number, planned, children))

    def _allowed(self, planned: PlannedLaunch, children: int) -> bool:
        settings = planned.loaded.settings
        if settings.standby != "on" or not command.needs_sglang():
            return False
        need, free = 2 * STANDBY_PROCESS_BYTES * (children + 1), available_bytes()
        if settings.nnodes > 1 or int(planned.plan.parallel["dp_attention"]) > 1:
            # Their ports are fixed, and taken by the engine that serves.
            self._log.info("no standby: several nodes or data-parallel attention")
        elif not children:
            self._log.info("no standby: the engine has no processes that could wait")
        elif free < need:
            self._log.info(
                f"no standby: it may need {format_bytes(need)} of host memory, {format_bytes(free)} are free"
            )
        else:
            return True
        return False

    async def _prepare(self, number: int, planned: PlannedLaunch, children: int) -> None:
        began = time.monotonic()
        self._status.standby = "preparing"
        try:
            settings = planned.loaded.settings
            place = self._scratch = await asyncio.to_thread(scratch.make, settings.state_dir, number)
            identity = self._identity = await asyncio.to_thread(self._identify, number, planned, place)
            standby = self._standby = self._make(
                identity.argv,
                identity.env,
                leftovers.run_directory(settings.state_dir),
                leftovers.run_id(settings.state_dir, number),
                self._sessions,
                children,
            )
            async with asyncio.timeout(PREPARE_TIMEOUT):
                await standby.imported()
            problem = standby.broken or await asyncio.to_thread(_on_a_gpu, standby, planned)
        except (OSError, TimeoutError, Stop) as error:
            problem = str(error) or "its imports took too long"
        if problem:
            await self._end(f"no standby: {problem}")
            return
        self._status.standby = "ready"
        self._log.info(f"standby ready after {format_duration(time.monotonic() - began)}: pid {standby.pid}")

    async def take(self, number: int, planned: PlannedLaunch) -> Standby | None:
        """Return the standby as engine ``number``, running; None when there is none that fits: start without it."""
        standby, identity = self._standby, self._identity
        if standby is None or identity is None:
            await self.drop("")
            return None
        if self._status.standby != "ready":
            await self.drop("a start without the standby: it is not ready yet")
            return None
        wanted = await asyncio.to_thread(self._identify, number, planned, self._scratch)
        problem = standby.broken or ", ".join(identity.differences(wanted))
        if problem or not await standby.release():
            await self.drop(f"a start without the standby: {problem or 'it did not answer'}")
            return None
        self._standby = self._identity = self._preparing = None
        self._status.standby = "none"
        self._log.info(f"the standby takes over: pid {standby.pid}")
        return standby

    async def drop(self, why: str) -> None:
        """End the standby, if there is one, and log ``why``. It is gone when this returns."""
        preparing, self._preparing = self._preparing, None
        if preparing is not None and not preparing.done():
            preparing.cancel()
            await asyncio.wait({preparing})
        await self._end(why)

    async def _end(self, why: str) -> None:
        standby, self._standby, self._identity = self._standby, None, None
        self._status.standby = "none"
        if standby is not None:
            if why:
                self._log.info(why)
            await standby.kill()
            await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)

    def _identify(self, number: int, planned: PlannedLaunch, place: Path) -> Identity:
        """Blocking: it lists the installed packages."""
        run_id = leftovers.run_id(planned.loaded.settings.state_dir, number)
        env = planned.command.environment(self._environ, run_id, place)
        return Identity(planned.command.executed(), env, _packages())


def _packages() -> frozenset[tuple[str, float]]:
    """What is installed, and since when: an upgrade beside a running engine must not be half of the next one."""
    folders = [Path(folder) for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")]
    found = (info for folder in folders for info in folder.glob("*.dist-info"))
    return frozenset((info.name, info.stat().st_mtime) for info in found)


def _on_a_gpu(standby: Standby, planned: PlannedLaunch) -> str | None:
    """Return what is wrong when the driver names a process of the standby: it may hold memory that a start needs."""
    from ..host import nvml

    indices = [gpu.index for gpu in planned.inventory.gpus]
    named = {holder.pid for holder in nvml.processes(indices)} & standby.tree.ever if indices else set()
    return f"the driver names its process {min(named)} on a GPU" if named else None
