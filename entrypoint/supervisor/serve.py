"""The loop that feeds events to the state machine and does what it says. One loop, one writer of the state."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

from ..config import loading
from ..config.schema import SECRETS, Settings
from ..config.settings import Loaded
from ..control import app as control
from ..control import server
from ..control.records import Records
from ..control.status import Status
from ..errors import Stop, config_rejected
from ..healing import events, machine
from ..healing.phases import Phase
from ..host import limits, ports
from ..host.parent_death import become_subreaper
from ..plan import Change
from ..scrub import from_environment
from ..state.lock import Lock
from ..units import format_duration
from . import offers
from .driver import Driver
from .launch import Launch
from .logs import Log
from .monitors import Alarm
from .node import MakeNode, Node, Refusal
from .status_reporter import StatusReporter
from .systemd import Notify

# Seconds that the server of the control port gets to end.
END_TIMEOUT = 2.0

# From the status, the log format and the environment: what keeps the header on the screen while it is entered.
Header = Callable[[Status, str, Mapping[str, str]], AbstractContextManager[None]]


class Supervisor:
    """One life of `relaunch serve`: the state machine, its driver, the control port and the signals."""

    def __init__(
        self,
        loaded: Loaded,
        environ: Mapping[str, str],
        log: Log,
        make_node: MakeNode = Node,
        trial: tuple[Change, ...] | None = None,
    ) -> None:
        settings = loaded.settings
        self._settings, self._environ, self._log = settings, environ, log
        self.status = Status()
        self._notify = Notify(environ, settings.drain_timeout)
        self._reporter = StatusReporter(self.status, log, self._notify, environ)
        self._events: asyncio.Queue[events.Event] = asyncio.Queue()
        self._driver = Driver(
            loaded,
            environ,
            log,
            self.status,
            self._events.put_nowait,
            self._reporter.on_wait,
            make_node,
            launch=Launch(environ, log, self.status, trial),
        )
        self._node = self._driver.node
        self._limits = _limits(settings, self._node)
        self._lock = Lock(settings.state_dir)

    # -- the loop ---------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Serve until stopped or given up; return the exit code. Raises Stop for what is wrong before anything was
        started."""
        settings = self._settings
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
        for warning in loading.open_doors(settings):
            self._log.warning(warning)
        become_subreaper()
        offered = offers.make(
            settings, self._environ, self.status, self._log, self._restart_requested, self._node.is_worker
        )
        app = control.build(
            self.status,
            Records(settings.state_dir),
            settings.control_token,
            group=self._node.endpoint,
            offers=offered,
        )
        http = server.server(app)
        serving = asyncio.create_task(server.serve(http, sock))
        link = asyncio.create_task(self._node.link())
        self._handle_signals()
        try:
            code = await self._loop()
            await self._node.on_exit()
            return code
        finally:
            link.cancel()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                asyncio.get_running_loop().add_signal_handler(number, lambda: None)
            http.should_exit = True
            with contextlib.suppress(Exception):
                await asyncio.wait_for(serving, END_TIMEOUT)
            sock.close()
            self._lock.release()

    async def _loop(self) -> int:
        state, actions = machine.start(self._limits, time.monotonic())
        self._reporter.on_step(state)
        self._driver.perform(state, actions)
        while self._driver.exit_code is None:
            event = await self._next(state)
            self._notify.alive()
            before = state
            if isinstance(event, events.StopRequested):
                self._node.on_stop_requested()
            state, actions = machine.step(state, event, time.monotonic())
            self._reporter.on_step(state)
            self._on_change(before, state, event)
            self._driver.perform(state, actions)
        await self._driver.close()
        await self._reporter.flush()
        return self._driver.exit_code

    def _on_change(self, before: machine.State, state: machine.State, event: events.Event) -> None:
        """What a change of phase means to others than the machine."""
        if state.phase.public is before.phase.public:
            return
        self._reporter.on_phase_change(before.phase, state, self._driver.loaded)
        if isinstance(event, events.Tick) and before.phase in (Phase.STARTING, Phase.PROBING):
            limit = format_duration(self._limits.startup_timeout)
            self._driver.on_alarm(Alarm(f"the start took longer than STARTUP_TIMEOUT={limit}", hang="startup"))
        if state.phase.public is Phase.GAVE_UP:
            if before.phase.public is Phase.RECOVERING:
                self._driver.mark_gave_up()
            self._node.on_gave_up(
                Refusal(state.cause or "unknown", state.reason or "", state.next_step or "", state.exit_code)
            )

    async def _next(self, state: machine.State) -> events.Event:
        deadline = machine.next_deadline(state)
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return await asyncio.wait_for(self._events.get(), self._notify.within(wait))
        except TimeoutError:
            return events.Tick()

    def _handle_signals(self) -> None:
        # Handlers only put an event into the queue.
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._events.put_nowait, events.StopRequested())
        loop.add_signal_handler(signal.SIGINT, self._events.put_nowait, events.StopRequested())
        loop.add_signal_handler(signal.SIGHUP, self._restart_requested)

    def _restart_requested(self) -> str | None:
        """Ask for a restart; return why there is none."""
        if self._node.is_worker:
            refused = "a restart of the group is asked of node 0: run `relaunch restart` there"
            self._log.warning(refused)
            return refused
        self._events.put_nowait(events.RestartRequested())
        return None


def _limits(settings: Settings, node: Node) -> machine.Limits:
    """The machine's limits. The head of a group counts restarts, and waits between them, for its workers."""
    return machine.Limits(
        max_restarts=sys.maxsize if node.is_worker else settings.max_restarts,
        restart_window=settings.restart_window,
        backoff_initial=0.0 if node.is_worker else settings.backoff_initial,
        backoff_max=settings.backoff_max,
        startup_timeout=settings.startup_timeout,
        drain_timeout=settings.drain_timeout,
        drain_grace=settings.drain_grace,
        hold_on_give_up=settings.on_give_up == "hold",
    )


def with_admin_key(loaded: Loaded, environ: Mapping[str, str]) -> tuple[Loaded, Mapping[str, str]]:
    """Return settings and environment with an admin key wherever clients have one: without it their key administers
    the engine. Raises Stop (78) for an admin key alone, with which clients need none at all and may read it.

    A generated key is good for one life of the supervisor and shown nowhere.
    """
    settings = loaded.settings
    if settings.admin_api_key and not settings.api_key:
        raise config_rejected(
            "RELAUNCH_ADMIN_API_KEY is set without RELAUNCH_API_KEY: the engine would answer anyone, and show the "
            "admin key to anyone who asks",
            "set RELAUNCH_API_KEY (or _FILE) too",
        )
    if not settings.api_key or settings.admin_api_key:
        return loaded, environ
    key = secrets.token_urlsafe(32)
    changed = settings.model_copy(update={"admin_api_key": key})
    return replace(loaded, settings=changed), {**environ, "RELAUNCH_ADMIN_API_KEY": key}


def run(
    loaded: Loaded,
    environ: Mapping[str, str],
    make_node: MakeNode,
    header: Header,
    trial: tuple[Change, ...] | None = None,
) -> int:
    """`relaunch serve`: serve until stopped or given up, and return the exit code. ``make_node`` makes this node's
    part in its group; ``header`` shows the status above the log lines, where the terminal can; ``trial``: `Launch`."""
    import uvloop

    loaded, environ = with_admin_key(loaded, environ)
    settings = loaded.settings
    limits.set_limits()
    log = Log(settings.log_level, settings.log_format, scrub=from_environment(environ, SECRETS))
    try:
        supervisor = Supervisor(loaded, environ, log, make_node, trial)
        with (
            header(supervisor.status, settings.log_format, environ),
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            return runner.run(supervisor.run())
    finally:
        # The end is under way: another signal must not change the exit code.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        log.close()
