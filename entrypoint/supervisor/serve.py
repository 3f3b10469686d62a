"""The loop that feeds events to the state machine and does what it says. One loop, one writer of the state."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from typing import Any

from ..config import loading
from ..config.settings import Loaded
from ..control import app as control
from ..control.records import Records
from ..control.status import Status
from ..engine import leftovers, process
from ..engine import log as engine_log
from ..engine.client import EngineClient
from ..engine.process import Ended
from ..engine.run import Run
from ..errors import Stop, config_rejected
from ..healing import machine
from ..healing.machine import Do, Phase
from ..host import discover, ports
from ..state.boots import Boot, Boots
from ..state.files import Lock
from ..units import format_duration
from . import preflight
from .diagnosis import Diagnosis, FailedRun, prewarm
from .launch import Launch, Prepared
from .logs import Log
from .monitors import Alarm, ServingMonitor, WorkerMonitor, watch_start
from .single_node import Refusal, SingleNode
from .status_reporter import StatusReporter
from .systemd import Notify

# After a process of the engine ended, its last words get this long to arrive before the tree is killed.
LAST_WORDS = 1.0


# From the settings, the launch, the diagnosis, and where events, alarms and waits are reported to: this node's part.
MakeGroup = Callable[
    [
        Loaded,
        Launch,
        Diagnosis,
        Callable[[machine.Event], None],
        Callable[[Alarm], None],
        Callable[[str | None], None],
    ],
    SingleNode,
]
# From the status, the log format and the environment: what keeps the header on the screen while it is entered.
Header = Callable[[Status, str, Mapping[str, str]], AbstractContextManager[None]]


class Supervisor:
    """One life of `relaunch serve`. ``run`` returns the exit code."""

    def __init__(self, loaded: Loaded, environ: Mapping[str, str], log: Log, make_group: MakeGroup) -> None:
        settings = loaded.settings
        self.loaded, self.environ, self.log = loaded, environ, log
        self.status = Status()
        self._notify = Notify(environ, settings.drain_timeout)
        self._reporter = StatusReporter(self.status, log, self._notify, environ)
        self._events: asyncio.Queue[machine.Event] = asyncio.Queue()
        self._launch = Launch(environ, log, self.status)
        self._diagnosis = Diagnosis(log)
        self._group = make_group(
            loaded, self._launch, self._diagnosis, self._events.put_nowait, self._take_alarm, self._reporter.wait
        )
        self._limits = machine.Limits(
            # The head counts for the whole group.
            max_restarts=sys.maxsize if self._group.follows else settings.max_restarts,
            restart_window=settings.restart_window,
            backoff_initial=0.0 if self._group.follows else settings.backoff_initial,
            backoff_max=settings.backoff_max,
            startup_timeout=settings.startup_timeout,
            drain_timeout=settings.drain_timeout,
            drain_grace=settings.drain_grace,
            hold_on_give_up=settings.on_give_up == "hold",
        )
        self._lock = Lock(settings.state_dir)
        self._boots = Boots(settings.state_dir)
        self._work: asyncio.Task[None] | None = None  # preparing, planning, diagnosing, recovering
        self._killing: asyncio.Task[None] | None = None
        self._follow: asyncio.Task[None] | None = None
        self._run_tasks: list[asyncio.Task[None]] = []  # watching and probing the run
        self._prepared: Prepared | None = None
        self._run: Run | None = None
        self._boot: Boot | None = None
        self._watch: ServingMonitor | WorkerMonitor | None = None
        self._client: EngineClient | None = None
        self._alarm: Alarm | None = None
        self._reference: tuple[float, ...] = ()
        self._last_event: engine_log.Event | None = None
        self._exit: asyncio.Future[int] | None = None

    # -- the loop ---------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Serve until stopped or given up. Raises Stop for what is wrong before anything was started."""
        settings = self.loaded.settings
        if settings.gpu_inventory is not None:
            raise config_rejected(
                "RELAUNCH_GPU_INVENTORY is for `relaunch plan`: serve runs on the GPUs that are here", "unset it"
            )
        self._lock.acquire()
        try:
            sock = ports.claim(settings.control_host, settings.control_port, "RELAUNCH_CONTROL_PORT")
        except Stop:
            self._lock.release()
            raise
        process.become_subreaper()
        records = Records(settings.state_dir)
        app = control.build(self.status, records, settings.control_token, group=self._group.endpoint)
        http = control.server(app)
        serving = asyncio.create_task(control.serve(http, sock))
        link = asyncio.create_task(self._group.link())
        self._signals()
        try:
            code = await self._loop()
            await self._group.farewell()
            return code
        finally:
            link.cancel()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                asyncio.get_running_loop().add_signal_handler(number, lambda: None)
            http.should_exit = True
            with contextlib.suppress(Exception):
                await asyncio.wait_for(serving, 2.0)
            sock.close()
            self._lock.release()

    async def _loop(self) -> int:
        self._exit = asyncio.get_running_loop().create_future()
        state, actions = machine.start(self._limits, time.monotonic())
        self._reporter.step(state)
        self._perform(state, actions)
        while not self._exit.done():  # only an action of this loop sets it
            event = await self._next(state)
            self._notify.alive()
            before = state.phase
            if isinstance(event, machine.StopRequested):
                self._group.leaving()
            state, actions = machine.step(state, event, time.monotonic())
            self._reporter.step(state)
            if state.phase is not before:
                self._reporter.change(before, state, self.loaded)
            if isinstance(event, machine.Tick) and before in (Phase.STARTING, Phase.PROBING) and actions:
                limit = format_duration(self._limits.startup_timeout)
                self._take_alarm(Alarm(f"the start took longer than STARTUP_TIMEOUT={limit}", hang="startup"))
            if state.phase is Phase.GAVE_UP and before is not Phase.GAVE_UP:
                if before is Phase.RECOVERING:
                    self._diagnosis.gave_up(self.loaded)
                self._group.gave_up(
                    Refusal(state.cause or "unknown", state.reason or "", state.next_step or "", state.exit_code)
                )
            self._perform(state, actions)
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait({self._work}, timeout=2.0)
        await self._reporter.told()
        return self._exit.result()

    async def _next(self, state: machine.State) -> machine.Event:
        deadline = machine.next_deadline(state)
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return await asyncio.wait_for(self._events.get(), self._notify.within(wait))
        except TimeoutError:
            return machine.Tick()

    def _signals(self) -> None:
        # Handlers only put an event into the queue.
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._events.put_nowait, machine.StopRequested())
        loop.add_signal_handler(signal.SIGINT, self._events.put_nowait, machine.StopRequested())
        loop.add_signal_handler(signal.SIGHUP, self._restart_requested)

    def _restart_requested(self) -> None:
        if self._group.follows:
            self.log.warning("a restart of the group is asked of node 0: run `relaunch restart` there")
        else:
            self._events.put_nowait(machine.RestartRequested())

    # -- what the machine says --------------------------------------------------------------------------

    def _perform(self, state: machine.State, actions: tuple[machine.Action, ...]) -> None:
        for action in actions:
            match action.do:
                case Do.PREPARE:
                    self._start_work(self._prepare())
                case Do.PLAN:
                    self._start_work(self._plan())
                case Do.SPAWN:
                    self._start_work(self._spawn(state.run))
                case Do.PROBE:
                    self._run_task(state.run, self._probe(state.run))
                case Do.RECORD_READY:
                    self._record_ready(state.run)
                case Do.RECORD_STABLE:
                    self._record_stable()
                case Do.DRAIN:
                    if self._run is not None:
                        self._run.engine.drain()
                case Do.KILL:
                    if self._killing is None or self._killing.done():
                        self._killing = asyncio.create_task(self._kill(state.run))
                case Do.DIAGNOSE:
                    self._start_work(self._diagnose())
                case Do.RECOVER:
                    self._start_work(self._recover(action.delay))
                case Do.CANCEL:
                    if self._work is not None:
                        self._work.cancel()
                case Do.EXIT:
                    assert self._exit is not None
                    if not self._exit.done():
                        self._exit.set_result(state.exit_code)

    def _start_work(self, work: Coroutine[Any, Any, machine.Event | None]) -> None:
        self._work = asyncio.create_task(self._guarded(work))

    async def _watched(self, number: int, work: Awaitable[machine.Event | None]) -> None:
        """A watch that fails must not leave an engine unwatched."""
        try:
            event = await work
        except Exception as error:
            self.log.error(f"internal error while watching the engine: {type(error).__name__}: {error}")
            event = machine.Unhealthy(number, f"internal error while watching: {error}")
        if event is not None:
            self._events.put_nowait(event)

    async def _guarded(self, work: Awaitable[machine.Event | None]) -> None:
        """Whatever goes wrong in a piece of work becomes an event: the loop itself never dies of it."""
        try:
            event = await work
        except Stop as stop:
            event = machine.Refused(stop.cause, stop.message, stop.next_step, stop.exit_code)
        except Exception as error:
            self.log.error(f"internal error: {type(error).__name__}: {error}")
            self.log.debug("".join(traceback.format_exception(error)))
            event = machine.Refused("unknown", f"internal error: {error}", "please report it", 70)
        if event is not None:
            self._events.put_nowait(event)

    def _run_task(self, number: int, work: Coroutine[Any, Any, machine.Event | None]) -> None:
        self._run_tasks.append(asyncio.create_task(self._watched(number, work)))

    # -- the pieces of work -----------------------------------------------------------------------------

    async def _prepare(self) -> machine.Event:
        settings = self.loaded.settings
        self._group.preparing()
        await asyncio.to_thread(leftovers.end, settings.state_dir, self.log.warning)
        self._boots.compact()
        box = await asyncio.to_thread(discover.current, self.loaded.settings.gpu_inventory, self.environ)
        self.loaded = loading.resolve_preset(self.loaded, len(box.gpus), self.environ)
        for note in self.loaded.notes:
            self.log.info(note)
        preflight.check(self.loaded, box)
        ports.require_free(settings.host, settings.port, "RELAUNCH_PORT")
        self._prepared = await self._launch.prepare(self.loaded, box)
        return machine.Prepared()

    async def _plan(self) -> machine.Event:
        assert self._prepared is not None
        self._prepared = await self._group.plan(self._prepared, self._diagnosis.changes)
        plan = self._prepared.plan
        assert plan is not None
        if not plan.feasible:
            raise config_rejected(plan.reasons[0], "; ".join(plan.reasons[1:]) or "see `relaunch plan`")
        self.status.typical_seconds = self._boots.typical_seconds(self._prepared.fingerprint)
        return machine.Planned()

    async def _spawn(self, number: int) -> machine.Event | None:
        prepared, settings = self._prepared, self.loaded.settings
        assert prepared is not None
        assert prepared.command is not None
        ports.require_free(settings.host, settings.port, "RELAUNCH_PORT")
        command = prepared.command
        run_id = f"{leftovers.mark_of(settings.state_dir)}{os.getpid()}-{number}"
        cwd = settings.state_dir / "run"
        self._alarm, self._watch = None, None
        if self._run is not None:
            self._run.kernel_evidence.close()
        try:
            cwd.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"{cwd} cannot be made: {error.strerror}"
            raise Stop("permission_denied", reason, "check RELAUNCH_STATE_DIR") from None
        try:
            engine = process.Engine(command.argv, command.environment(self.environ, run_id), cwd, run_id)
        except OSError as error:
            raise Stop("image_mismatch", f"the engine cannot be started: {error}", "check the installation") from None
        run = Run(
            number,
            engine,
            self._launch.scrub,
            on_line=self.log.engine,
            on_event=self._on_log_event,
            on_end=lambda ended: self._on_end(number, ended),
            on_gone=lambda: self._suspect(number, "the engine's main process is gone"),
        )
        self._run = run
        self._group.spawned(run)
        now = time.time()
        self._boot = Boot(id=f"{run_id}-{int(now)}", started_at=now, fingerprint=prepared.fingerprint)
        self._boots.write(self._boot)
        self.status.new_boot()
        self.log.info(f"engine started: pid {engine.pid}, boot {self._boot.id}")
        self._follow = asyncio.create_task(self._watched(number, run.follow()))
        self._run_tasks = []
        self._run_task(number, self._watch_start(run))
        self._run_task(number, self._group.watch(run))
        if number == 1:
            with contextlib.suppress(Exception):  # whatever is wrong with it shows when it is needed
                await asyncio.to_thread(prewarm)
        return None

    async def _watch_start(self, run: Run) -> machine.Event:
        quiet_elsewhere = self._group.quiet
        alarm = await watch_start(run, self.loaded.settings, self._take_last_event, quiet_elsewhere)
        self._take_alarm(alarm)
        return machine.Unhealthy(run.number, alarm.reason)

    def _take_last_event(self) -> engine_log.Event | None:
        event, self._last_event = self._last_event, None
        return event

    async def _probe(self, number: int) -> machine.Event:
        run, prepared = self._run, self._prepared
        assert run is not None and prepared is not None
        if self._group.follows:  # the head has proven it for all
            self._watch = WorkerMonitor(run, self.loaded.settings)
            return machine.ProbePassed(number)
        client = self._client = await self._launch.client(self.loaded)
        watch = ServingMonitor(
            run, self.loaded.settings, client, self._launch.canary_kind(prepared), self.status, self._reference
        )
        problem = await self._launch.prove(prepared, run, client)
        if problem is not None:
            self._take_alarm(Alarm(problem))
            return machine.Unhealthy(number, problem)
        verdict = await watch.ask_canary()
        while verdict is None:  # the start-up deadline and the stall watch go on meanwhile
            await asyncio.sleep(1.0)
            verdict = await watch.ask_canary()
        if verdict.failure and self.loaded.settings.canary:
            self._take_alarm(Alarm(verdict.detail, canary=verdict.failure))
            return machine.Unhealthy(number, verdict.detail)
        self._watch = watch
        return machine.ProbePassed(number)

    def _record_ready(self, number: int) -> None:
        assert self._run is not None and self._boot is not None and self._watch is not None
        for task in self._run_tasks:
            task.cancel()
        self._boot.ready_at = time.time()
        self._boot.stages = self._run.stage_seconds()
        self._boots.write(self._boot)
        self._diagnosis.reached_ready()
        self._reference = self._watch.reference
        self._run.engine.census_every = 5.0
        self.status.started = True
        settings = self.loaded.settings
        took = format_duration(time.monotonic() - self._run.began)
        if self._group.follows:
            self.log.info(f"ready in {took}: node {settings.node_rank} of {settings.nnodes}; clients talk to node 0")
        else:
            self.log.info(f"ready in {took}: http://{settings.host}:{settings.port}")
        self._group.ready()
        self._run_task(number, self._watch_serving(number, self._watch))
        self._run_task(number, self._group.watch(self._run))

    async def _watch_serving(self, number: int, watch: ServingMonitor | WorkerMonitor) -> machine.Event:
        alarm = await watch.watch()
        self._take_alarm(alarm)
        return machine.Unhealthy(number, alarm.reason)

    def _take_alarm(self, alarm: Alarm) -> None:
        """Why the run is about to be ended. The first reason counts: what comes after follows from it."""
        run = self._run
        if self._alarm is None and (run is None or run.failure_started_at is None):
            self._alarm = alarm
            if run is not None:
                run.mark_failing()

    def _record_stable(self) -> None:
        learns = self.loaded.settings.learn and not self._group.follows
        if self._prepared is not None and self._run is not None and learns:
            self._launch.remember(self._prepared, self._run, self._diagnosis.changes)

    async def _kill(self, number: int) -> None:
        run = self._run
        self._group.mark_failing()
        await self._group.parting()
        if run is None or run.number != number:  # nothing was spawned
            self._events.put_nowait(machine.TreeGone(number))
            return
        for task in self._run_tasks:
            task.cancel()
        run.mark_failing()
        if self._alarm is not None and self._alarm.hang:
            await self._diagnosis.dump_stacks(run)
        stuck = await run.engine.kill()
        if self._client is not None:
            await self._client.close()
            self._client = None
        if self._follow is not None:
            await asyncio.wait({self._follow}, timeout=3.0)
        if self._boot is not None:
            self._boot.ended_at = time.time()
            self._boot.stages = run.stage_seconds()
            self._boots.write(self._boot)
        names = tuple(f"{p.pid}" for p in stuck)
        self._events.put_nowait(machine.TreeGone(number, names))

    async def _diagnose(self) -> machine.Event:
        assert self._run is not None and self._prepared is not None and self._boot is not None
        failed = FailedRun(self._run, self._prepared, self._boot, self._alarm)
        found = await self._group.diagnose(failed, self.loaded)
        if self._group.follows:
            self.log.warning(f"this run of the group ended: {found.cause}: {found.reason}")
        self.status.restarts[found.cause] = self.status.restarts.get(found.cause, 0) + (1 if found.retry else 0)
        self._boot.post_mortem = self._diagnosis.last_post_mortem
        self._boots.write(self._boot)
        return found

    async def _recover(self, delay: float) -> machine.Event:
        assert self._prepared is not None
        self._group.recovering()
        if delay:
            self.log.info(f"waiting {format_duration(delay)} before the next start")
        await asyncio.sleep(delay)
        self._prepared = await self._launch.recover(self._prepared, self._diagnosis)
        self._diagnosis.recovered()
        return machine.Recovered()

    # -- callbacks of the run ---------------------------------------------------------------------------

    def _on_log_event(self, event: engine_log.Event) -> None:
        self._last_event = event
        if self._watch is not None:
            self._watch.log_event(event)
        run = self._run
        if run is None:
            return
        if isinstance(event, engine_log.FiredUp):
            self._events.put_nowait(machine.FiredUp(run.number))
        progress = self.status.progress
        if "shards" in run.progress:
            progress.shards, progress.shards_total = run.progress["shards"]
        if "graphs" in run.progress:
            progress.graphs, progress.graphs_total = run.progress["graphs"]
        self.status.stage = run.stage if self.status.phase in (Phase.STARTING, Phase.PROBING) else None
        self.status.stages = run.stages
        self.status.readings = run.readings

    def _on_end(self, number: int, ended: Ended) -> None:
        if ended.role == "main":
            if self._run is not None and self._run.number == number:
                self._run.mark_failing()
            self._events.put_nowait(machine.EngineEnded(number))
        elif ended.role == "worker" and self.status.phase == Phase.READY:
            return  # what never took a title before READY is no scheduler: helpers come and go
        elif self.status.phase in (Phase.STARTING, Phase.PROBING, Phase.READY):
            # sglang itself notices too, but takes up to a minute to die of it.
            self._suspect(number, f"{ended.role} of the engine is gone")
            asyncio.get_running_loop().call_later(LAST_WORDS, self._part_ended, number, ended)

    def _suspect(self, number: int, reason: str) -> None:
        """No balancer should send more, from this moment on."""
        if self._run is None or self._run.number != number:
            return
        self._run.mark_failing()
        if self.status.phase == Phase.READY:
            self.status.doomed = reason

    def _part_ended(self, number: int, ended: Ended) -> None:
        under_way = self._run is not None and self._run.number == number
        if under_way and self.status.phase in (Phase.STARTING, Phase.PROBING, Phase.READY):
            self.log.warning(f"{ended.role} (pid {ended.pid}) of the engine is gone")
            self._events.put_nowait(machine.EngineEnded(number))


def run(loaded: Loaded, environ: Mapping[str, str], make_group: MakeGroup, header: Header) -> int:
    """`relaunch serve`: serve until stopped or given up, and return the exit code. ``make_group`` makes this node's
    part in its group; ``header`` shows the status above the log lines, where the terminal can."""
    import uvloop

    settings = loaded.settings
    log = Log(settings.log_level, settings.log_format)
    try:
        supervisor = Supervisor(loaded, environ, log, make_group)
        with (
            header(supervisor.status, settings.log_format, environ),
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            return runner.run(supervisor.run())
    finally:
        # The end is under way: another signal must not change the exit code.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        log.close()
