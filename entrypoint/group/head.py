"""Node 0 of a group: gathers the workers before each start, ends all when one ends, decides for all."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from dataclasses import fields, replace

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from ..config.settings import Loaded
from ..engine.log import TAXONOMY_STAGE
from ..engine.run import Run
from ..errors import Stop, config_rejected
from ..healing import events
from ..host.inventory import Gpu, Inventory
from ..plan import Change
from ..supervisor.diagnosis import Conclusion
from ..supervisor.evidence import FailedRun, NodeEvidence
from ..supervisor.launch import PlannedLaunch, PreparedLaunch
from ..supervisor.monitors import Alarm
from ..supervisor.node import Node, NodeContext, Refusal
from .coordinator import Coordinator, HeardEnd, Rejected
from .identity import identity
from .messages import NEVER, Outcome, answer_to, report_from

LOOK_EVERY = 0.2
# Of a report: what a worker sends of its log (`follower.py`) is 24 MiB of JSON at the most.
MOST_BYTES = 40 << 20
# Workers get this long to end their engine and say how it ended.
END_PATIENCE = 45.0
FAREWELL_SECONDS = 3.0


class Head(Node):
    """Node 0: its control port is where the workers report."""

    def __init__(self, context: NodeContext) -> None:
        super().__init__(context)
        settings = context.loaded.settings
        self._authority = Coordinator(settings.nnodes, settings.hang_timeout, uuid.uuid4().hex)
        self._on_alarm, self._on_wait = context.on_alarm, context.on_wait
        self._run: Run | None = None
        self._leaving = asyncio.Event()  # a worker says that it is being stopped
        self.endpoint = self._report

    async def _report(self, request: Request) -> Response:
        """`POST /group`: 200 with an Answer; 400 for what is no report, 409 for who cannot be one of the group, 413."""
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                if len(body) > MOST_BYTES:
                    return JSONResponse({"error": "too long"}, 413)
            report = report_from(bytes(body))
        except (ValueError, ClientDisconnect):
            return JSONResponse({"error": "no report of a node; do all nodes run the same relaunch?"}, 400)
        now = time.monotonic()
        self._authority.quiet = now - self._run.active if self._run is not None else NEVER
        try:
            answer = self._authority.hear(report, now)
        except Rejected as why:
            return JSONResponse({"error": str(why)}, 409)
        if report.standing == "leaving":
            self._leaving.set()
        return Response(answer_to(answer), media_type="application/json")

    async def plan(self, prepared: PreparedLaunch, changes: tuple[Change, ...]) -> PlannedLaunch:
        mine = identity(prepared)
        while True:
            try:
                while waits := self._missing(mine):
                    self._on_wait("waiting for the group: " + "; ".join(waits))
                    await asyncio.sleep(LOOK_EVERY)
            finally:
                self._on_wait(None)
            group = replace(prepared, inventory=self._common(prepared.inventory))
            planned = await self.launch.plan(group, changes)
            if not planned.plan.feasible:
                break
            if not self._missing(mine):  # planning takes its time
                self._authority.begin(planned.plan)
                break
        return replace(planned, inventory=prepared.inventory)

    def _missing(self, mine: dict[str, str]) -> tuple[str, ...]:
        given_up = self._authority.refused()
        if given_up is not None:
            member, refusal = given_up
            raise Stop(
                refusal.cause, f"{member.name}: {refusal.reason}", refusal.next_step, exit_code=refusal.exit_code
            )
        try:
            return self._authority.missing(mine, time.monotonic())
        except Rejected as why:
            alike = "nodes of one group must be alike: give all the same image, model and environment"
            raise config_rejected(str(why), alike) from None

    def _common(self, box: Inventory) -> Inventory:
        """This box with the least memory that the GPU of the same place has on any node: one command fits all."""
        cards = [member.report.cards for member in self._authority.members.values()]
        for member in self._authority.members.values():
            theirs = [(c.name, c.sm) for c in member.report.cards]
            ours = [(g.name, g.sm) for g in box.gpus]
            if theirs != ours:
                told = f"{member.name} has {_count(theirs)}, node 0 has {_count(ours)}"
                raise config_rejected(told, "give all nodes the same GPUs, or mask with CUDA_VISIBLE_DEVICES")

        def least(place: int, gpu: Gpu) -> Gpu:
            total = min(gpu.total_bytes, *(c[place].total_bytes for c in cards))
            free = min(gpu.free_bytes, *(c[place].free_bytes for c in cards))
            return replace(gpu, total_bytes=total, free_bytes=free)

        return replace(box, gpus=tuple(least(place, gpu) for place, gpu in enumerate(box.gpus)))

    def on_spawn(self, run: Run) -> None:
        self._run = run

    async def watch(self, run: Run) -> events.Event:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), LOOK_EVERY)
            self._leaving.clear()
            if self._authority.running and self._authority.leaving():
                return events.RestartRequested(at_once=True)
            reason = self._authority.lost(time.monotonic())
            if reason:
                self._on_alarm(Alarm(reason, group=True))
                return events.Unhealthy(run.number, reason)

    def seconds_since_peer_progress(self) -> float:
        now = time.monotonic()
        return min((member.quiet(now) for member in self._authority.members.values()), default=NEVER)

    def on_ready(self) -> None:
        self._authority.ready = True

    async def before_kill(self) -> None:
        self._authority.end()

    async def diagnose(self, failed: FailedRun, loaded: Loaded) -> Conclusion:
        began = time.monotonic()
        while self._authority.owing(time.monotonic()) and time.monotonic() - began < END_PATIENCE:
            await asyncio.sleep(LOOK_EVERY / 4)
        others = [_finding(rank, heard) for rank, heard in self._authority.ends.items()]
        others += [_vanished(rank, *gone, failed) for rank, gone in self._authority.vanished(time.monotonic()).items()]
        conclusion = await self.diagnosis.diagnose(failed, loaded, others)
        found, recovery = conclusion.diagnosed, conclusion.recovery
        self._authority.conclude(
            Outcome(
                found.cause,
                found.reason,
                found.next_step,
                found.exit_code,
                found.retry,
                conclusion.node,
                recovery.repair,
                recovery.clear_jit_cache,
                recovery.wait_for_memory,
            )
        )
        if conclusion.node != 0:  # the files are that node's to repair
            conclusion = replace(conclusion, recovery=replace(recovery, repair=None))
        return conclusion

    def on_recovering(self) -> None:
        self._authority.conclude_planned()

    def on_gave_up(self, refusal: Refusal) -> None:
        self._authority.give_up(refusal)

    async def on_exit(self) -> None:
        self._authority.end()  # begun, and stopped before anything was spawned here
        began = time.monotonic()
        while self._authority.untold(time.monotonic()) and time.monotonic() - began < FAREWELL_SECONDS:
            await asyncio.sleep(LOOK_EVERY)


def _finding(rank: int, heard: HeardEnd) -> NodeEvidence:
    from ..healing.classify import Observed

    end = heard.end
    # Another version may observe more than this one knows.
    observed = {each.name: end.observed[each.name] for each in fields(Observed) if each.name in end.observed}
    observed["xids"] = tuple(observed.get("xids", ()))
    return NodeEvidence(
        rank, heard.at, end.own, end.lines, Observed(**observed), end.exit_code, end.alarm, end.stages, end.readings
    )


def _vanished(rank: int, at: float, words: str, failed: FailedRun) -> NodeEvidence:
    """A node that went before it could say anything: what our own ranks then say of it is only an echo."""
    from ..healing.classify import Observed

    stage = TAXONOMY_STAGE.get(failed.run.stage, failed.run.stage)
    return NodeEvidence(rank, at, True, (words,), Observed(stage=stage), None, words, {}, {})


def _count(cards: list[tuple[str, int]]) -> str:
    names = dict.fromkeys(name for name, _ in cards)
    return " and ".join(f"{sum(name == n for n, _ in cards)} x {name}" for name in names) or "no GPU"
