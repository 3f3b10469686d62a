"""A worker of a group: asks the head what to do, and does only that. Without the head it waits."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from ..diagnosis import Diagnosis, Patient
from ..engine.run import Run
from ..errors import Stop, config_rejected
from ..healing import machine
from ..launch import Launch, Prepared
from ..plan import Change
from ..settings import Loaded
from ..watching import Alarm
from . import address
from .alone import Alone
from .identity import cards, identity
from .words import Answer, Card, End, Outcome, Refusal, Report, Standing, answer_from, report_to

if TYPE_CHECKING:
    import httpx

BEAT = 0.5
# Seconds, where there is nothing to count from.
NEVER = 1e9
FAREWELL_SECONDS = 5.0


class Follower(Alone):
    """``post`` sends events to the supervisor's loop; the other callbacks are as in `head.py`."""

    follows = True

    def __init__(
        self,
        launch: Launch,
        diagnosis: Diagnosis,
        loaded: Loaded,
        post: Callable[[machine.Event], None],
        on_alarm: Callable[[Alarm], None],
        on_wait: Callable[[str | None], None],
    ) -> None:
        super().__init__(launch, diagnosis)
        self._settings = loaded.settings
        self._post, self._on_alarm, self._on_wait = post, on_alarm, on_wait
        self._head = address.head_address(loaded.settings)
        self._life, self._host = uuid.uuid4().hex, address.host_name()
        self._standing: Standing = "preparing"
        self._epoch: str | None = None
        self._identity: dict[str, str] = {}
        self._cards: tuple[Card, ...] = ()
        self._end: End | None = None
        self._end_at = 0.0
        self._refusal: Refusal | None = None
        self._told = False  # the head knows of our refusal
        self._run: Run | None = None
        self._answered = time.monotonic()
        self._answer: Answer | None = None
        self._silence: str | None = None
        self._barred: Stop | None = None  # the head will not have us
        self._beat = asyncio.Event()  # set after every attempt to reach the head

    # -- the link ----------------------------------------------------------------------------------------------

    async def link(self) -> machine.Event:
        import httpx

        wait = min(5.0, self._settings.hang_timeout / 3)
        headers = {"Authorization": f"Bearer {self._settings.control_token}", "Content-Type": "application/json"}
        async with httpx.AsyncClient(timeout=wait, trust_env=False, headers=headers) as client:
            while True:
                began = time.monotonic()
                try:
                    self._take(await self._ask(client))
                except Stop as stop:
                    self._barred = stop
                    self._beat.set()
                    return await super().link()
                except (httpx.HTTPError, ValueError) as error:
                    self._silence = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                self._beat.set()
                self._beat = asyncio.Event()
                await asyncio.sleep(max(0.05, BEAT - (time.monotonic() - began)))

    async def _ask(self, client: httpx.AsyncClient) -> Answer:
        sent = self._report()
        response = await client.post(f"http://{self._head}/group", content=report_to(sent))
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
            why = response.json().get("error", "no reason given")
            raise config_rejected(f"the head at {self._head} refuses this node: {why}", "see the head's log")
        response.raise_for_status()
        answer = answer_from(response.content)
        self._answered, self._silence = time.monotonic(), None
        if sent.refusal is not None:
            self._told = True
        return answer

    def _report(self) -> Report:
        now = time.monotonic()
        end = self._end
        if end is not None:
            end = End(**{**vars(end), "age": now - self._end_at})
        return Report(
            self._settings.node_rank, self._life, self._host, self._standing, self._epoch, self._identity, self._cards,
            now - self._run.active if self._run is not None else NEVER, end, self._refusal,
        )  # fmt: skip

    def _take(self, answer: Answer) -> None:
        self._answer = answer
        if answer.order == "over" and answer.refusal is not None and self._standing in ("preparing", "waiting"):
            refusal = answer.refusal
            self._told = True
            self._post(machine.Refused(refusal.cause, refusal.reason, refusal.next_step, refusal.exit_code))
        run = self._run
        if answer.order == "run" and answer.ready and run is not None and answer.epoch == self._epoch:
            self._post(machine.FiredUp(run.number))  # which says nothing new once this node is READY

    async def _next(self) -> Answer | None:
        """The answer to the next beat; None when there was none. Raises Stop once the head has refused us."""
        self._answer = None
        if self._barred is None:
            await self._beat.wait()
        if self._barred is not None:
            raise self._barred
        return self._answer

    # -- what the supervisor asks ------------------------------------------------------------------------------

    def preparing(self) -> None:
        self._standing, self._epoch, self._end = "preparing", None, None

    async def plan(self, prepared: Prepared, changes: tuple[Change, ...]) -> Prepared:
        self._identity, self._cards = identity(prepared), cards(prepared.inventory)
        self._standing, self._epoch, self._end, self._run = "waiting", None, None, None
        try:
            while True:
                answer = await self._next()
                if answer is not None and answer.order == "start" and answer.plan is not None:
                    self._standing, self._epoch = "running", answer.epoch
                    return await self.launch.adopt(prepared, answer.plan)
                why = self._silence or (answer.words if answer is not None else "")
                self._on_wait(f"waiting for the head at {self._head}" + (f": {why}" if why else ""))
        finally:
            self._on_wait(None)

    def spawned(self, run: Run) -> None:
        self._run = run

    async def watch(self, run: Run) -> machine.Event:
        while True:
            try:
                answer = await self._next()
            except Stop as stop:
                self._on_alarm(Alarm(stop.message, group=True))
                return machine.Unhealthy(run.number, stop.message)
            silent = time.monotonic() - self._answered
            reason = None
            if answer is None and silent > self._settings.hang_timeout:
                reason = f"the head at {self._head} is no longer heard"
            elif answer is not None and answer.order in ("end", "over"):
                reason = answer.words or "the group is over"
            if reason:
                self._on_alarm(Alarm(reason, group=True))
                return machine.Unhealthy(run.number, reason)

    def quiet(self) -> float:
        return self._answer.quiet if self._answer is not None else NEVER

    def leaving(self) -> None:
        self._standing = "leaving"

    async def diagnose(self, patient: Patient, loaded: Loaded) -> machine.Diagnosed:
        """Say how it ended; hear what follows. Waits for a head that is away."""
        found = await self.diagnosis.find(patient)
        self._end_at = found.at
        self._end = End(
            0.0, found.own, asdict(found.observed), tuple(found.lines), found.exit_code, found.alarm,
            found.stages, found.readings,
        )  # fmt: skip
        self._standing = "ended"
        while True:
            try:
                answer = await self._next()
            except Stop as stop:
                return machine.Diagnosed(stop.cause, stop.message, stop.next_step, stop.exit_code, retry=False)
            if answer is not None and answer.order == "over" and answer.refusal is not None:
                self._told = True
                refusal = answer.refusal
                return machine.Diagnosed(
                    refusal.cause, refusal.reason, refusal.next_step, refusal.exit_code, retry=False
                )
            if answer is not None and answer.outcome is not None:
                return self._follow(answer.outcome)
            if answer is None:
                self._on_wait(f"waiting for the head at {self._head}: {self._silence}")

    def _follow(self, outcome: Outcome) -> machine.Diagnosed:
        told = self.diagnosis
        told.repair = outcome.repair if outcome.node == self._settings.node_rank else None
        told.clear_jit_cache, told.wait_for_memory = outcome.clear_jit_cache, outcome.wait_for_memory
        return machine.Diagnosed(
            outcome.cause, outcome.reason, outcome.next_step, outcome.exit_code, retry=outcome.retry
        )

    def recovering(self) -> None:
        self._standing, self._end = "preparing", None

    def gave_up(self, refusal: Refusal) -> None:
        self._standing, self._refusal = "gave_up", refusal

    async def farewell(self) -> None:
        began = time.monotonic()
        while self._standing == "gave_up" and not (self._told or self._barred):
            if time.monotonic() - began > FAREWELL_SECONDS:
                return
            await asyncio.sleep(0.05)
