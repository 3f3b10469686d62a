"""A worker of a group: asks the head what to do, and does only that. Without the head it waits."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from ..config.settings import Loaded
from ..engine.run import Run
from ..engine.watchdog import Ticks
from ..errors import Stop, config_rejected
from ..healing import events
from ..plan import Change
from ..supervisor.diagnosis import Conclusion
from ..supervisor.evidence import FailedRun, collect
from ..supervisor.launch import PlannedLaunch, PreparedLaunch
from ..supervisor.monitors import Alarm
from ..supervisor.node import Node, NodeContext, Refusal
from ..supervisor.recovery import Recovery
from .membership import gpus, head_address, host_name, identity
from .messages import NEVER, End, Outcome, Reply, Report, WorkerGpu, WorkerState, dump_report, parse_reply

if TYPE_CHECKING:
    import httpx

REPORT_EVERY = 0.5
EXIT_TIMEOUT = 5.0
# Before the engine of a node that is being stopped is killed, and before that node goes.
STOP_TIMEOUT = 1.0
# Characters of the log that a report carries; JSON makes at most six times as many bytes of them.
MAX_LOG_CHARS = 4 << 20


class GroupWorker(Node):
    """Any node but node 0: reports to the head and does what it answers."""

    is_worker = True

    def __init__(self, context: NodeContext) -> None:
        super().__init__(context)
        self._settings = context.loaded.settings
        self._post, self._on_alarm, self._on_wait = context.post, context.on_alarm, context.on_wait
        self._head = head_address(self._settings)
        self._instance_id, self._host = uuid.uuid4().hex, host_name()
        self._state: WorkerState = "preparing"
        self._epoch: str | None = None
        self._identity: dict[str, str] = {}
        self._gpus: tuple[WorkerGpu, ...] = ()
        self._end: End | None = None
        self._end_at = 0.0
        self._refusal: Refusal | None = None
        self._gave_up = False  # the head gave up, and we with it
        self._run: Run | None = None
        self._replied_at = time.monotonic()
        self._acknowledged_state: WorkerState | None = None  # how we stood in the last report that was answered
        self._peers_idle_seconds = NEVER  # of the other nodes, when that was answered
        self._reply: Reply | None = None
        self._link_error: str | None = None
        self._refused: Stop | None = None  # the head will not have us
        self._attempted = asyncio.Event()  # set after every attempt to reach the head
        self._report_now = asyncio.Event()  # something that the head should hear at once

    # -- the link ----------------------------------------------------------------------------------------------

    async def link(self) -> None:
        """Report to the head twice a second, and at once when something changed, until it refuses this node."""
        import httpx

        wait = min(5.0, self._settings.hang_timeout / 3)
        bearer = f"Bearer {self._settings.control_token}".encode()
        headers = {b"Authorization": bearer, b"Content-Type": b"application/json"}
        async with httpx.AsyncClient(timeout=wait, trust_env=False, headers=headers) as client:
            while True:
                began = time.monotonic()
                try:
                    self._accept(await self._ask(client))
                except Stop as stop:
                    self._refused = stop
                    self._attempted.set()
                    return
                except Exception as error:  # whatever it is: without the link this node would wait for ever
                    self._link_error = self._line(f"{type(error).__name__}: {error}")
                self._attempted.set()
                self._attempted = asyncio.Event()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(
                        self._report_now.wait(), max(0.05, REPORT_EVERY - (time.monotonic() - began))
                    )
                self._report_now.clear()

    def _line(self, text: str) -> str:
        """On one line, and without the secret that some errors of the HTTP client quote."""
        return " ".join(text.replace(str(self._settings.control_token), "***").split())[:200]

    async def _ask(self, client: httpx.AsyncClient) -> Reply:
        sent = self._report()
        response = await client.post(f"http://{self._head}/group", content=dump_report(sent))
        if response.status_code == 401:
            raise config_rejected(
                f"the head at {self._head} refuses our RELAUNCH_CONTROL_TOKEN", "set the same token on every node"
            )
        if response.status_code in (404, 405):
            raise config_rejected(
                f"{self._head} is the control port of no group's head",
                "check RELAUNCH_GROUP_HEAD (or RELAUNCH_DIST_INIT_ADDR), and RELAUNCH_NNODES there",
            )
        if response.status_code in (400, 409):
            try:
                why = self._line(str(response.json()["error"]))
            except (ValueError, TypeError, KeyError):
                why = "no reason given"
            raise config_rejected(f"the head at {self._head} refuses this node: {why}", "see the head's log")
        response.raise_for_status()
        try:
            answer = parse_reply(response.content)
        except ValueError:
            raise ConnectionError("what answers there is no head of a group") from None
        self._replied_at, self._link_error, self._acknowledged_state = time.monotonic(), None, sent.state
        return answer

    def _report(self) -> Report:
        now = time.monotonic()
        end = self._end
        if end is not None:
            end = End(**{**vars(end), "age": now - self._end_at})
        return Report(
            self._settings.node_rank,
            self._instance_id,
            self._host,
            self._state,
            self._epoch,
            self._identity,
            self._gpus,
            now - self._run.active if self._run is not None else NEVER,
            end,
            self._refusal,
        )

    def _accept(self, answer: Reply) -> None:
        self._reply = answer
        if answer.order in ("start", "run"):
            self._peers_idle_seconds = answer.idle_seconds
        refusal = answer.refusal if answer.order == "over" else None
        self._gave_up = self._gave_up or refusal is not None
        if refusal is not None and self._state == "preparing":
            self._post(events.Refused(refusal.cause, refusal.reason, refusal.next_step, refusal.exit_code))
        run = self._run
        if answer.order == "run" and answer.ready and run is not None and answer.epoch == self._epoch:
            self._post(events.FiredUp(run.number))  # which says nothing new once this node is READY

    async def _next_reply(self) -> Reply | None:
        """The answer to the next beat; None when there was none. Raises Stop once the head has refused us."""
        self._reply = None
        if self._refused is None:
            await self._attempted.wait()
        if self._refused is not None:
            raise self._refused
        return self._reply

    # -- what the supervisor asks ------------------------------------------------------------------------------

    def on_preparing(self) -> None:
        """Report that this node prepares."""
        self._state, self._epoch, self._end = "preparing", None, None

    async def plan(self, prepared: PreparedLaunch, changes: tuple[Change, ...]) -> PlannedLaunch:
        """Wait until the head says start, and adopt its plan."""
        self._identity, self._gpus = identity(prepared), gpus(prepared.inventory)
        self._state, self._epoch, self._end, self._run = "waiting", None, None, None
        try:
            while True:
                answer = await self._next_reply()
                if answer is not None and answer.order == "start" and answer.plan is not None:
                    self._state, self._epoch = "running", answer.epoch
                    return await self.launch.adopt(prepared, answer.plan)
                if answer is not None and answer.refusal is not None:
                    over = answer.refusal
                    raise Stop(over.cause, over.reason, over.next_step, exit_code=over.exit_code)
                why = self._link_error or (answer.message if answer is not None else "")
                self._on_wait(f"waiting for the head at {self._head}" + (f": {why}" if why else ""))
        finally:
            self._on_wait(None)

    def on_spawn(self, run: Run) -> None:
        """Remember the run, whose progress the other nodes count."""
        self._run, self._peers_idle_seconds = run, NEVER

    async def watch(self, run: Run) -> events.Event:
        """Wait until the head ends the epoch or is no longer heard."""
        # An attempt to reach the head may take this long.
        ticks = Ticks(min(5.0, self._settings.hang_timeout / 3) + REPORT_EVERY, time.monotonic())
        while True:
            try:
                answer = await self._next_reply()
            except Stop as stop:
                self._on_alarm(Alarm(stop.message, group=True))
                return events.Unhealthy(run.number, stop.message)
            now = time.monotonic()
            self._replied_at += ticks.gap(now)
            silent = now - self._replied_at
            reason = None
            if answer is None and silent > self._settings.hang_timeout:
                reason = f"the head at {self._head} is no longer heard"
            elif answer is not None and answer.order in ("end", "over"):
                reason = answer.message or "the group is over"
            if reason:
                self._on_alarm(Alarm(reason, group=True))
                return events.Unhealthy(run.number, reason)

    def seconds_since_peer_progress(self) -> float:
        """Seconds since the engine of another node showed progress."""
        return self._peers_idle_seconds + time.monotonic() - self._replied_at

    def on_stop_requested(self) -> None:
        """Report at once that this node is being stopped."""
        self._state = "leaving"
        self._report_now.set()

    async def before_kill(self) -> None:
        """Wait until the head knows, so that an engine killed for a stop is not taken for a failure."""
        # An engine that is killed for a stop must not look like one that fell.
        await self._wait_acknowledged(STOP_TIMEOUT)

    async def _wait_acknowledged(self, seconds: float) -> None:
        """Until the head knows how we stand; not when it cannot be reached."""
        began = time.monotonic()
        while self._state in ("leaving", "gave_up") and self._acknowledged_state != self._state:
            away = self._state == "leaving" and self._link_error is not None
            if away or self._refused or time.monotonic() - began > seconds:
                return
            await asyncio.sleep(0.05)

    async def diagnose(self, failed: FailedRun, loaded: Loaded) -> Conclusion:
        """Say how it ended; hear what follows. Waits for a head that is away."""
        found = await collect(failed)
        self._end_at = found.at
        self._end = End(
            0.0,
            found.own,
            asdict(found.observed),
            _fitting(found.lines),
            found.exit_code,
            found.alarm,
            found.stages,
            found.readings,
        )
        self._state = "ended"
        while True:
            try:
                answer = await self._next_reply()
            except Stop as stop:
                return _final(Refusal(stop.cause, stop.message, stop.next_step, stop.exit_code))
            if answer is not None and answer.order == "over" and answer.refusal is not None:
                return _final(answer.refusal)
            if answer is not None and answer.outcome is not None:
                return self._apply(answer.outcome)
            if answer is None:
                self._on_wait(f"waiting for the head at {self._head}: {self._link_error}")

    def _apply(self, outcome: Outcome) -> Conclusion:
        self._gave_up = self._gave_up or not outcome.retry
        repair = outcome.repair if outcome.node == self._settings.node_rank else None
        return Conclusion(
            events.Diagnosed(outcome.cause, outcome.reason, outcome.next_step, outcome.exit_code, outcome.retry),
            Recovery(repair, outcome.clear_jit_cache, outcome.wait_for_memory),
            outcome.node,
        )

    def on_recovering(self) -> None:
        """Report that this node prepares."""
        self._state, self._end = "preparing", None

    def on_gave_up(self, refusal: Refusal) -> None:
        """Report why this node gave up."""
        # What came from the head is not ours: a head that returns must not give up over it again.
        self._state, self._refusal = "gave_up", None if self._gave_up else refusal
        self._report_now.set()

    async def on_exit(self) -> None:
        """Wait until the head knows that this node goes."""
        if not self._gave_up:
            await self._wait_acknowledged(STOP_TIMEOUT if self._state == "leaving" else EXIT_TIMEOUT)


def _final(refusal: Refusal) -> Conclusion:
    """No restart: the head refused this node, or gave up for all."""
    over = events.Diagnosed(refusal.cause, refusal.reason, refusal.next_step, refusal.exit_code, retry=False)
    return Conclusion(over, Recovery())


def _fitting(lines: Sequence[str]) -> tuple[str, ...]:
    """The last lines, as many as a report may carry."""
    room, kept = MAX_LOG_CHARS, []
    for line in reversed(lines):
        room -= len(line)
        if room < 0:
            break
        kept.append(line)
    return tuple(reversed(kept))
