"""One run of the engine with everything that belongs to it alone: tree, boot record, monitors, client, alarm, tasks.

Made at the spawn. `kill` ends it and leaves a `FailedRun`, which is all that the diagnosis needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from ..control.status import Status
from ..engine import leftovers, process, scratch
from ..engine import log as engine_log
from ..engine.client import EngineClient
from ..engine.process import Ended
from ..engine.run import Run
from ..errors import Stop, unwritable
from ..healing import events
from ..healing.phases import Phase
from ..host import nvml, ports
from ..host.limits import is_exhaustion
from ..state.boots import Boot, Boots
from ..units import format_duration
from .evidence import FailedRun, dump_stacks
from .launch import Launch, PlannedLaunch
from .logs import Log
from .monitors import Alarm, ServingMonitor, WorkerMonitor, watch_start
from .node import Node

# After a process of the engine ended, its last lines get this long to arrive before the tree is killed.
LAST_LINES_DELAY = 1.0
# The output of a tree that is gone is read for at most this long.
FOLLOW_TIMEOUT = 3.0
# Seconds between two looks at a serving tree, which starts no processes of its own any more.
SERVING_CENSUS = 5.0

# Seconds between two looks at the free memory of the GPUs while serving.
MEMORY_EVERY = 5.0
# Seconds until the watch is tried again when this host had no descriptors left for it.
WATCH_AGAIN = 5.0

_UP = (Phase.STARTING, Phase.PROBING, Phase.READY)


@dataclass(frozen=True)
class RunContext:
    """What all runs share. ``post`` puts an event into the state machine's queue; ``sessions`` are those of all
    engines of this supervisor."""

    environ: Mapping[str, str]
    log: Log
    status: Status
    launch: Launch
    node: Node
    boots: Boots
    post: Callable[[events.Event], None]
    sessions: set[int]


class ActiveRun:
    """Constructing it spawns the engine, unless ``standby`` is already it. Raises Stop when that is impossible."""

    def __init__(
        self, context: RunContext, number: int, planned: PlannedLaunch, standby: process.Engine | None = None
    ) -> None:
        settings = planned.loaded.settings
        self._context, self._number, self._planned = context, number, planned
        self._alarm: Alarm | None = None
        self._monitor: ServingMonitor | WorkerMonitor | None = None
        self._client: EngineClient | None = None
        self._last_event: engine_log.Event | None = None
        self._over = False
        self._tasks: list[asyncio.Task[None]] = []
        ports.require_free(settings.host, settings.port, "RELAUNCH_PORT")
        engine = standby or _spawn(context, number, planned)
        self.run = Run(
            number,
            engine,
            context.launch.scrub,
            ranks=int(planned.plan.parallel["tp"]),
            most_bytes=max((gpu.total_bytes for gpu in planned.inventory.gpus), default=math.inf),
            on_line=context.log.engine,
            on_event=self._on_log_event,
            on_end=self._on_end,
            on_gone=lambda: self._suspect("the engine's main process is gone"),
        )
        context.node.on_spawn(self.run)
        now = time.time()
        self._boot = Boot(id=f"{engine.run_id}-{int(now)}", started_at=now, fingerprint=planned.fingerprint)
        self._boot.standby = standby is not None
        context.boots.write(self._boot)
        context.status.new_boot()
        context.log.info(f"engine started: pid {engine.pid}, boot {self._boot.id}")
        self._follow = asyncio.create_task(self._guarded(self.run.follow))
        self._start(self._watch_start)
        self._start(lambda: context.node.watch(self.run))

    # -- from the spawn to READY ------------------------------------------------------------------------

    def probe(self, reference: tuple[float, ...]) -> None:
        """Begin to ask whether it is ours and sane; posts ProbePassed or Unhealthy. ``reference``: a sane answer of
        an earlier run, empty when there is none."""
        self._start(lambda: self._probe(reference))

    async def _probe(self, reference: tuple[float, ...]) -> events.Event:
        launch, planned, settings = self._context.launch, self._planned, self._planned.loaded.settings
        if self._context.node.is_worker:  # the head has asked for all
            self._monitor = WorkerMonitor(self.run, settings)
            return events.ProbePassed(self._number)
        client = self._client = await launch.client(planned.loaded)
        monitor = ServingMonitor(
            self.run, settings, client, launch.canary_kind(planned), self._context.status, reference
        )
        problem = await launch.verify_server(planned, self.run, client)
        if problem is not None:
            return self._unhealthy(Alarm(problem))
        verdict = await monitor.ask_canary()
        while verdict is None:  # the start-up deadline and the stall watch go on meanwhile
            await asyncio.sleep(1.0)
            verdict = await monitor.ask_canary()
        if verdict.failure and settings.canary:
            return self._unhealthy(Alarm(verdict.detail, canary=verdict.failure))
        self._monitor = monitor
        return events.ProbePassed(self._number)

    def record_ready(self) -> tuple[float, ...]:
        """The probe passed: write the boot record, watch the serving engine. Return the canary's reference."""
        context, settings, monitor = self._context, self._planned.loaded.settings, self._monitor
        assert monitor is not None  # ProbePassed comes from _probe alone
        for task in self._tasks:
            task.cancel()
        self._boot.ready_at = time.time()
        self._boot.stages = self.run.stage_seconds()
        context.boots.write(self._boot)
        self.run.engine.census_every = SERVING_CENSUS
        took = format_duration(time.monotonic() - self.run.began)
        if context.node.is_worker:
            context.log.info(f"ready in {took}: node {settings.node_rank} of {settings.nnodes}; clients talk to node 0")
        else:
            context.log.info(f"ready in {took}: http://{settings.host}:{settings.port}")
        context.node.on_ready()
        self._start(lambda: self._watch_serving(monitor))
        self._start(self._watch_memory)
        self._start(lambda: context.node.watch(self.run))
        return monitor.reference

    # -- the monitors -----------------------------------------------------------------------------------

    def _start(self, work: Callable[[], Awaitable[events.Event | None]]) -> None:
        self._tasks.append(asyncio.create_task(self._guarded(work)))

    async def _guarded(self, work: Callable[[], Awaitable[events.Event | None]]) -> None:
        """Do ``work``, and again where this host had no descriptors left for it: that the engine could not be looked
        at says nothing of the engine. Any other failure of a monitor must not leave an engine unwatched."""
        while True:
            try:
                event = await work()
                break
            except Exception as error:
                if not is_exhaustion(error):
                    self._context.log.error(
                        f"internal error while watching the engine: {type(error).__name__}: {error}"
                    )
                    event = events.Unhealthy(self._number, f"internal error while watching: {error}")
                    break
                self._context.log.warning(f"the engine cannot be watched now: {error}")
                await asyncio.sleep(WATCH_AGAIN)
        if event is not None:
            self._context.post(event)

    async def _watch_start(self) -> events.Event:
        def newest() -> engine_log.Event | None:
            event, self._last_event = self._last_event, None
            return event

        peers = self._context.node.seconds_since_peer_progress
        return self._unhealthy(await watch_start(self.run, self._planned.loaded.settings, newest, peers))

    async def _watch_serving(self, monitor: ServingMonitor | WorkerMonitor) -> events.Event:
        return self._unhealthy(await monitor.watch())

    async def _watch_memory(self) -> None:
        """Note the least free memory of the GPUs from time to time: it confirms, or not, that memory ran out."""
        gpus = [gpu.index for gpu in self._planned.inventory.gpus]
        while gpus:
            free = await asyncio.to_thread(nvml.free_bytes, gpus)
            self.run.gpu_free_bytes = min(free.values(), default=None)
            await asyncio.sleep(MEMORY_EVERY)

    def _unhealthy(self, alarm: Alarm) -> events.Event:
        self.raise_alarm(alarm)
        return events.Unhealthy(self._number, alarm.reason)

    def raise_alarm(self, alarm: Alarm) -> None:
        """Note why the run is about to be ended. The first reason counts: what comes after follows from it."""
        if self._alarm is None and self.run.failure_started_at is None:
            self._alarm = alarm
            self.run.mark_failing()

    # -- the end ----------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Ask the engine to finish its requests and end."""
        self.run.engine.drain()

    async def kill(self) -> FailedRun:
        """Kill every process, drop what belongs to the run, and return what a diagnosis needs."""
        self._over = True
        for task in self._tasks:
            task.cancel()
        self.run.mark_failing()
        hung = self._alarm is not None and self._alarm.hang
        stacks: tuple[str, ...] = ()
        with contextlib.suppress(OSError):  # a dump is a help, never a must
            stacks = await dump_stacks(self.run) if hung else ()
        try:
            for stuck in await self.run.engine.kill():
                self._context.log.warning(f"pid {stuck.pid} of the engine does not die: it is stuck in a driver call")
        except Exception as error:  # the next start ends what is left
            self._context.log.error(f"internal error while ending the engine: {type(error).__name__}: {error}")
        await asyncio.to_thread(scratch.remove, self._planned.loaded.settings.state_dir, self._number)
        if self._client is not None:
            await self._client.close()
        await asyncio.wait({self._follow}, timeout=FOLLOW_TIMEOUT)
        self._boot.ended_at = time.time()
        self._boot.stages = self.run.stage_seconds()
        self._context.boots.write(self._boot)
        return FailedRun(self.run, self._planned, self._boot, self._alarm, stacks)

    # -- callbacks of the run ---------------------------------------------------------------------------

    def _on_log_event(self, event: engine_log.Event) -> None:
        self._last_event = event
        if isinstance(event, engine_log.FiredUp):
            self._context.post(events.FiredUp(self._number))
        run, status = self.run, self._context.status
        if "shards" in run.progress:
            status.progress.shards, status.progress.shards_total = run.progress["shards"]
        if "graphs" in run.progress:
            status.progress.graphs, status.progress.graphs_total = run.progress["graphs"]
        status.stage = run.stage if status.phase in (Phase.STARTING, Phase.PROBING) else None
        status.stages, status.readings = run.stages, run.readings

    def _on_end(self, ended: Ended) -> None:
        phase = self._context.status.phase
        if ended.role == "main":
            self.run.mark_failing()
            self._context.post(events.EngineEnded(self._number))
        elif ended.role == "worker" and phase == Phase.READY:
            return  # what never took a title before READY is no scheduler: helpers come and go
        elif phase in _UP:
            # sglang itself notices too, but takes up to a minute to die of it.
            self._suspect(f"{ended.role} of the engine is gone")
            asyncio.get_running_loop().call_later(LAST_LINES_DELAY, self._process_ended, ended)

    def _suspect(self, reason: str) -> None:
        """No balancer should send more, from this moment on."""
        self.run.mark_failing()
        if not self._over and self._context.status.phase == Phase.READY:
            self._context.status.doomed = reason

    def _process_ended(self, ended: Ended) -> None:
        if not self._over and self._context.status.phase in _UP:
            self._context.log.warning(f"{ended.role} (pid {ended.pid}) of the engine is gone")
            self._context.post(events.EngineEnded(self._number))


def _spawn(context: RunContext, number: int, planned: PlannedLaunch) -> process.Engine:
    """Start an engine from nothing. Raises Stop."""
    state_dir, command = planned.loaded.settings.state_dir, planned.command
    run_id, directory = leftovers.run_id(state_dir, number), leftovers.run_directory(state_dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable("RELAUNCH_STATE_DIR", directory, error) from None
    env = command.environment(context.environ, run_id, scratch.make(state_dir, number))
    try:
        return process.Engine(command.executed(), env, directory, run_id, context.sessions)
    except OSError as error:
        raise Stop("image_mismatch", f"the engine cannot be started: {error}", "check the installation") from None
