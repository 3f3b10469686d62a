"""How the state machine's steps show outside: status, log lines, the service manager, the give-up message."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from ..config.settings import Loaded
from ..control.status import Progress, Status
from ..healing.machine import Phase, State
from . import give_up_notifier
from .logs import Log
from .systemd import Notify

# Seconds between two lines about what a start waits for: it may wait for days, for one thing after the other.
WAIT_SAID_EVERY = 10.0


class StatusReporter:
    """Called on the loop after every step."""

    def __init__(self, status: Status, log: Log, notify: Notify, environ: Mapping[str, str]) -> None:
        self._status, self._log, self._notify, self._environ = status, log, notify, environ
        self._announcing: asyncio.Task[None] | None = None
        self._said: tuple[str, float] | None = None  # the last line about a wait, and when

    def step(self, state: State) -> None:
        """Status and service manager follow the machine."""
        status = self._status
        if status.phase != state.phase.value:
            status.phase, status.phase_since = state.phase.value, time.monotonic()
            status.healthy, status.reason, status.doomed = True, None, None
            self._notify.phase(state.phase, state.reason if state.phase is Phase.GAVE_UP else None)
            if state.phase is Phase.PLANNING:
                status.progress = Progress()
        if state.phase not in (Phase.STARTING, Phase.PROBING):
            status.stage = None
        if state.phase in (Phase.GAVE_UP, Phase.RECOVERING) or (state.phase is Phase.PLANNING and state.cause):
            status.reason = f"{state.cause}: {state.reason}" if state.cause else None
            status.next_step = state.next_step if state.phase is Phase.GAVE_UP else None

    def wait(self, words: str | None) -> None:
        """What a start waits for elsewhere; None when it no longer does."""
        now = time.monotonic()
        if words is None:
            self._said = None
        elif self._said is None or (words != self._said[0] and now - self._said[1] >= WAIT_SAID_EVERY):
            self._said = (words, now)
            self._log.info(words)
        self._status.reason = words

    def change(self, before: Phase, state: State, loaded: Loaded) -> None:
        """A line for a change of phase; giving up is told to whoever is to know."""
        if state.phase is not Phase.GAVE_UP:
            self._log.info(f"{before.value} -> {state.phase.value}")
            return
        step = f"; {state.next_step}" if state.next_step else ""
        self._log.error(f"gave up: {state.cause}: {state.reason}{step}")
        settings = loaded.settings
        told = give_up_notifier.message(settings, state.cause, state.reason, state.next_step, state.exit_code)
        self._announcing = asyncio.create_task(
            give_up_notifier.announce(settings, self._environ, told, self._log.warning)
        )
        if state.limits.hold_on_give_up:
            self._log.error("holding without an engine (ON_GIVE_UP=hold) until SIGTERM")

    async def told(self) -> None:
        """Until the message has gone out."""
        if self._announcing is not None:
            await self._announcing
