"""Publishes the state machine's steps: status, log lines, the service manager, the message about giving up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from ..config.settings import Loaded
from ..control.status import Progress, Status
from ..healing.machine import State
from ..healing.phases import Phase
from . import give_up_notifier
from .logs import Log
from .systemd import Notify

# Seconds between two lines about what a start waits for: it may wait for days, for one thing after the other.
WAIT_LOGGED_EVERY = 10.0


class StatusReporter:
    """Called on the event loop. ``clock`` gives monotonic seconds."""

    def __init__(
        self,
        status: Status,
        log: Log,
        notify: Notify,
        environ: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._status, self._log, self._notify, self._environ, self._clock = status, log, notify, environ, clock
        self._announcing: asyncio.Task[None] | None = None
        self._wait_logged: tuple[str, float] | None = None  # the last line about a wait, and when

    def on_step(self, state: State) -> None:
        """Called after every step of the machine: status and service manager follow it."""
        status, phase = self._status, state.phase.public
        gave_up = phase is Phase.GAVE_UP
        if status.phase != phase.value:
            status.phase, status.phase_since = phase.value, self._clock()
            status.healthy, status.reason, status.doomed = True, None, None
            self._notify.phase(phase, state.reason if gave_up else None)
            if phase is Phase.PLANNING:
                status.progress = Progress()
        if phase not in (Phase.STARTING, Phase.PROBING):
            status.stage = None
        if gave_up or phase is Phase.RECOVERING or (phase is Phase.PLANNING and state.cause):
            status.reason = f"{state.cause}: {state.reason}" if state.cause else None
            status.next_step = state.next_step if gave_up else None

    def on_wait(self, reason: str | None) -> None:
        """Publish why the start is blocked on another node; None clears it. Logged at most every ten seconds."""
        now = self._clock()
        if reason is None:
            self._wait_logged = None
        elif self._wait_logged is None or (
            reason != self._wait_logged[0] and now - self._wait_logged[1] >= WAIT_LOGGED_EVERY
        ):
            self._wait_logged = (reason, now)
            self._log.info(reason)
        self._status.reason = reason

    def on_phase_change(self, before: Phase, state: State, loaded: Loaded) -> None:
        """Log a change of the public phase; start to send the message when it is giving up."""
        if state.phase.public is not Phase.GAVE_UP:
            self._log.info(f"{before.public.value} -> {state.phase.public.value}")
            return
        step = f"; {state.next_step}" if state.next_step else ""
        self._log.error(f"gave up: {state.cause}: {state.reason}{step}")
        settings = loaded.settings
        document = give_up_notifier.message(settings, state.cause, state.reason, state.next_step, state.exit_code)
        self._announcing = asyncio.create_task(
            give_up_notifier.announce(settings, self._environ, document, self._log.warning)
        )
        if state.limits.hold_on_give_up:
            self._log.error("holding without an engine (ON_GIVE_UP=hold) until SIGTERM")

    async def flush(self) -> None:
        """Wait until the message about giving up, if any, has been sent or has failed: half a minute at the most."""
        if self._announcing is not None:
            await self._announcing
