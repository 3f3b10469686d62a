"""Does what the state machine says: prepare, plan, spawn, probe, kill, diagnose, recover. Results go back as events."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from ..config import loading
from ..config.settings import Loaded
from ..control.status import Status
from ..engine import leftovers
from ..errors import Stop, config_rejected, refused
from ..healing import events, machine
from ..healing.events import Do
from ..host import discover, ports
from ..plan import Change
from ..state.boots import Boots
from ..state.post_mortems import PostMortems
from ..units import format_duration
from . import preflight, recovery
from .active_run import ActiveRun, RunContext
from .diagnosis import Diagnosis
from .evidence import FailedRun, load_classifier
from .launch import Launch, PlannedLaunch, PreparedLaunch
from .logs import Log
from .monitors import Alarm
from .node import MakeNode, Node, NodeContext
from .recovery import Recovery
from .standby_keeper import StandbyKeeper

# EX_SOFTWARE of sysexits: an error of our own.
INTERNAL_ERROR_EXIT = 70
# Work that is cancelled gets this many seconds to end.
CANCEL_TIMEOUT = 2.0


class Driver:
    """The I/O of the state machine. At most one piece of work and one kill are under way at a time.

    ``post`` puts an event into the machine's queue; ``on_wait`` publishes what a start waits for. The collaborators
    that are not given are made. ``exit_code`` is set by the action EXIT.
    """

    # Set by _prepare and _plan, before anything reads them.
    _prepared: PreparedLaunch
    _planned: PlannedLaunch

    def __init__(
        self,
        loaded: Loaded,
        environ: Mapping[str, str],
        log: Log,
        status: Status,
        post: Callable[[events.Event], None],
        on_wait: Callable[[str | None], None],
        make_node: MakeNode = Node,
        *,
        launch: Launch | None = None,
        diagnosis: Diagnosis | None = None,
        recover: Callable[[PlannedLaunch, Recovery, Mapping[str, str], Log], Awaitable[None]] = recovery.recover,
    ) -> None:
        self.loaded = loaded
        self._environ, self._log, self._status, self._post = environ, log, status, post
        self._launch = launch or Launch(environ, log, status)
        self._diagnosis = diagnosis or Diagnosis(log)
        self._recover_engine = recover
        self.node = make_node(NodeContext(loaded, self._launch, self._diagnosis, post, self.on_alarm, on_wait))
        self._boots = Boots(loaded.settings.state_dir)
        sessions: set[int] = set()
        self._run_context = RunContext(environ, log, status, self._launch, self.node, self._boots, post, sessions)
        self._keeper = StandbyKeeper(environ, log, status, sessions)
        self._work: asyncio.Task[None] | None = None  # preparing, planning, spawning, diagnosing or recovering
        self._killing: asyncio.Task[None] | None = None
        self._active: ActiveRun | None = None
        self._failed: FailedRun | None = None  # the last run, once its tree is gone
        self._reference: tuple[float, ...] = ()  # a sane answer to the canary
        self._changes: tuple[Change, ...] = ()
        self._recovery = Recovery()
        self._post_mortem: str | None = None
        self.exit_code: int | None = None

    def on_alarm(self, alarm: Alarm) -> None:
        """Note why the engine is about to be ended; nothing when none runs."""
        if self._active is not None:
            self._active.raise_alarm(alarm)

    def mark_gave_up(self) -> None:
        """Write into the last post-mortem that no restart followed."""
        if self._post_mortem is not None:
            PostMortems(self.loaded.settings.state_dir).mark_gave_up(self._post_mortem)

    async def close(self) -> None:
        """End what is left when the loop is over: work under way, and a standby."""
        await self._cancel()
        await self._keeper.drop("")

    async def _cancel(self) -> None:
        """Cancel the work under way, if any, and wait for its end, for two seconds at the most."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait({self._work}, timeout=CANCEL_TIMEOUT)

    def perform(self, state: machine.State, actions: tuple[events.Action, ...]) -> None:
        """Start what ``actions`` ask for; returns at once."""
        work: dict[Do, Callable[[], Coroutine[Any, Any, events.Event | None]]] = {
            Do.PREPARE: self._prepare,
            Do.PLAN: self._plan,
            Do.SPAWN: lambda: self._spawn(state.run),
            Do.DIAGNOSE: self._diagnose,
        }
        for action in actions:
            if action.do in work:
                self._start_work(work[action.do]())
            elif action.do is Do.RECOVER:
                self._start_work(self._recover(action.delay))
            elif action.do is Do.RECORD_STABLE:
                self._record_stable(state.run)
            elif action.do is Do.CANCEL and self._work is not None:
                self._work.cancel()
            elif action.do is Do.KILL and (self._killing is None or self._killing.done()):
                self._killing = asyncio.create_task(self._kill(state.run))
            elif action.do is Do.EXIT:
                self.exit_code = state.exit_code
            elif self._active is not None:
                self._perform_on(self._active, action.do)

    def _perform_on(self, active: ActiveRun, do: Do) -> None:
        if do is Do.PROBE:
            active.probe(self._reference)
        elif do is Do.RECORD_READY:
            self._reference = active.record_ready()
            self._diagnosis.on_ready()
            self._status.started = True
        elif do is Do.DRAIN:
            active.drain()

    def _start_work(self, work: Coroutine[Any, Any, events.Event | None]) -> None:
        self._work = asyncio.create_task(self._guarded(work))

    async def _guarded(self, work: Awaitable[events.Event | None]) -> None:
        """Whatever goes wrong in a piece of work becomes an event: the loop itself never dies of it."""
        try:
            event = await work
        except Stop as stop:
            event = events.Refused(stop.cause, stop.message, stop.next_step, stop.exit_code)
        except Exception as error:
            event = self._unforeseen(error)
        if event is not None:
            self._post(event)

    def _unforeseen(self, error: Exception) -> events.Refused:
        """Return the refusal for a path that this user may not use, with the setting that chose it; anything else is
        a fault of relaunch."""
        self._log.debug("".join(traceback.format_exception(error)))
        if isinstance(error, OSError) and error.filename is not None:
            stop = refused(error, loading.places(self.loaded.settings, self._environ))
            return events.Refused(stop.cause, stop.message, stop.next_step, stop.exit_code)
        self._log.error(f"internal error: {type(error).__name__}: {error}")
        return events.Refused("unknown", f"internal error: {error}", "please report it", INTERNAL_ERROR_EXIT)

    # -- the pieces of work -----------------------------------------------------------------------------

    async def _prepare(self) -> events.Event:
        settings = self.loaded.settings
        self.node.on_preparing()
        await asyncio.to_thread(leftovers.end, settings.state_dir, self._log.warning)
        self._boots.compact()
        found = await asyncio.to_thread(discover.current, settings.gpu_inventory, self._environ)
        self.loaded = loading.resolve_preset(self.loaded, len(found.gpus), self._environ)
        for note in self.loaded.notes:
            self._log.info(note)
        preflight.check(self.loaded, found)
        ports.require_free(settings.host, settings.port, "RELAUNCH_PORT")
        self._prepared = await self._launch.prepare(self.loaded, found)
        return events.Prepared()

    async def _plan(self) -> events.Event:
        self._planned = await self.node.plan(self._prepared, self._changes)
        plan = self._planned.plan
        if not plan.feasible:
            raise config_rejected(plan.reasons[0], "; ".join(plan.reasons[1:]) or "see `relaunch plan`")
        self._status.typical_seconds = self._boots.typical_seconds(self._planned.fingerprint)
        return events.Planned()

    async def _spawn(self, number: int) -> events.Event | None:
        if self._failed is not None:
            self._failed.run.kernel_evidence.close()
        standby = await self._keeper.take(number, self._planned)
        try:
            self._active = ActiveRun(self._run_context, number, self._planned, standby)
        except Stop:
            if standby is not None:
                await standby.kill()
            raise
        if standby is not None:
            self._status.typical_seconds = self._boots.typical_seconds(self._planned.fingerprint, standby=True)
        if number == 1:
            with contextlib.suppress(Exception):  # whatever is wrong with it shows when it is needed
                await asyncio.to_thread(load_classifier)
        return None

    async def _kill(self, number: int) -> None:
        """Kill the tree and post TreeGone, whatever goes wrong: without it the machine would wait for its deadline."""
        try:
            try:
                await self.node.before_kill()
            except Exception as error:
                self._log.error(f"internal error before the engine is killed: {type(error).__name__}: {error}")
            if self._active is None:
                await self._cancel()  # a spawn that was not done
            else:
                active, self._failed = self._active, None
                self._failed = await active.kill()
                self._active = None
        finally:
            self._post(events.TreeGone(number))

    async def _diagnose(self) -> events.Event:
        failed = self._failed
        assert failed is not None  # DIAGNOSE follows TreeGone of a run that was spawned
        conclusion = await self.node.diagnose(failed, self.loaded)
        found = conclusion.diagnosed
        if conclusion.cold or conclusion.changes != self._changes or conclusion.recovery != Recovery():
            await self._keeper.drop(f"a start without the standby, after {found.cause}")
        self._changes, self._recovery = conclusion.changes, conclusion.recovery
        self._post_mortem = failed.boot.post_mortem = conclusion.post_mortem
        if self.node.is_worker:
            self._log.warning(f"this run of the group ended: {found.cause}: {found.reason}")
        self._status.restarts[found.cause] = self._status.restarts.get(found.cause, 0) + (1 if found.retry else 0)
        self._boots.write(failed.boot)
        return found

    async def _recover(self, delay: float) -> events.Event:
        self.node.on_recovering()
        if delay:
            self._log.info(f"waiting {format_duration(delay)} before the next start")
        await asyncio.sleep(delay)
        await self._recover_engine(self._planned, self._recovery, self._environ, self._log)
        self._recovery = Recovery()  # done: a planned restart later must not do it again
        return events.Recovered()

    def _record_stable(self, number: int) -> None:
        if self._active is None:
            return
        self._keeper.prepare(number + 1, self._planned, self._active.run.engine)
        if self.loaded.settings.learn and not self.node.is_worker:
            self._launch.record_known_good(self._planned, self._active.run, self._changes)
