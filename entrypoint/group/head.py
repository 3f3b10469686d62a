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
from ..engine.log import Stage
from ..engine.run import Run
from ..engine.watchdog import Ticks
from ..errors import Stop, config_rejected
from ..healing import events
from ..host.inventory import Gpu, Inventory
from ..plan import Change
from ..supervisor.diagnosis import Conclusion
from ..supervisor.evidence import FailedRun, NodeEvidence
from ..supervisor.launch import PlannedLaunch, PreparedLaunch
from ..supervisor.monitors import Alarm
from ..supervisor.node import Node, NodeContext, Refusal
from .coordinator import Coordinator, IncompatibleWorker, ReportedEnd
from .membership import identity
from .messages import NEVER, Outcome, dump_reply, parse_report

LOOK_EVERY = 0.2
# Of a report: what a worker sends of its log (`worker.py`) is 24 MiB of JSON at the most.
MAX_REPORT_BYTES = 40 << 20
# Workers get this long to end their engine and say how it ended.
END_TIMEOUT = 45.0
EXIT_TIMEOUT = 3.0


class GroupHead(Node):
    """Node 0: its control port is where the workers report."""

    def __init__(self, context: NodeContext) -> None:
        super().__init__(context)
        settings = context.loaded.settings
        self._coordinator = Coordinator(settings.nnodes, settings.hang_timeout, uuid.uuid4().hex)
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
                if len(body) > MAX_REPORT_BYTES:
                    return JSONResponse({"error": "too long"}, 413)
            report = parse_report(bytes(body))
        except (ValueError, ClientDisconnect):
            return JSONResponse({"error": "no report of a node; do all nodes run the same relaunch?"}, 400)
        now = time.monotonic()
        self._coordinator.idle_seconds = now - self._run.active if self._run is not None else NEVER
        try:
            answer = self._coordinator.hear(report, now)
        except IncompatibleWorker as why:
            return JSONResponse({"error": str(why)}, 409)
        if report.state == "leaving":
            self._leaving.set()
        return Response(dump_reply(answer), media_type="application/json")

    async def plan(self, prepared: PreparedLaunch, changes: tuple[Change, ...]) -> PlannedLaunch:
        """Wait until every worker is ready, then plan for the smallest of the GPUs and start the epoch."""
        mine = identity(prepared)
        while True:
            try:
                while waits := self._not_ready(mine):
                    self._on_wait("waiting for the group: " + "; ".join(waits))
                    await asyncio.sleep(LOOK_EVERY)
            finally:
                self._on_wait(None)
            group = replace(prepared, inventory=self._common(prepared.inventory))
            planned = await self.launch.plan(group, changes)
            if not planned.plan.feasible:
                break
            if not self._not_ready(mine):  # planning takes its time
                self._coordinator.begin(planned.plan)
                break
        return replace(planned, inventory=prepared.inventory)

    def _not_ready(self, mine: dict[str, str]) -> tuple[str, ...]:
        given_up = self._coordinator.refused()
        if given_up is not None:
            member, refusal = given_up
            raise Stop(
                refusal.cause, f"{member.name}: {refusal.reason}", refusal.next_step, exit_code=refusal.exit_code
            )
        try:
            return self._coordinator.not_ready(mine, time.monotonic())
        except IncompatibleWorker as why:
            alike = "nodes of one group must be alike: give all the same image, model and environment"
            raise config_rejected(str(why), alike) from None

    def _common(self, box: Inventory) -> Inventory:
        """This box with the least memory that the GPU of the same place has on any node: one command fits all."""
        gpus = [member.report.gpus for member in self._coordinator.members.values()]
        for member in self._coordinator.members.values():
            theirs = [(c.name, c.sm) for c in member.report.gpus]
            ours = [(g.name, g.sm) for g in box.gpus]
            if theirs != ours:
                acknowledged = f"{member.name} has {_count(theirs)}, node 0 has {_count(ours)}"
                raise config_rejected(acknowledged, "give all nodes the same GPUs, or mask with CUDA_VISIBLE_DEVICES")

        def least(place: int, gpu: Gpu) -> Gpu:
            total = min(gpu.total_bytes, *(c[place].total_bytes for c in gpus))
            free = min(gpu.free_bytes, *(c[place].free_bytes for c in gpus))
            return replace(gpu, total_bytes=total, free_bytes=free)

        return replace(box, gpus=tuple(least(place, gpu) for place, gpu in enumerate(box.gpus)))

    def on_spawn(self, run: Run) -> None:
        """Remember the run, whose progress the other nodes count."""
        self._run = run

    async def watch(self, run: Run) -> events.Event:
        """Wait until a worker is lost, ends its engine, or is being stopped."""
        ticks = Ticks(LOOK_EVERY, time.monotonic())
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), LOOK_EVERY)
            if gap := ticks.gap(time.monotonic()):
                self._coordinator.shift(gap)
            self._leaving.clear()
            if self._coordinator.running and self._coordinator.leaving():
                return events.RestartRequested(at_once=True)
            reason = self._coordinator.end_reason(time.monotonic())
            if reason:
                self._on_alarm(Alarm(reason, group=True))
                return events.Unhealthy(run.number, reason)

    def seconds_since_peer_progress(self) -> float:
        """Seconds since the engine of another node showed progress."""
        now = time.monotonic()
        return min((member.idle_seconds(now) for member in self._coordinator.members.values()), default=NEVER)

    def on_ready(self) -> None:
        """Tell the workers that the group serves."""
        self._coordinator.ready = True

    async def before_kill(self) -> None:
        """End the epoch on all nodes."""
        self._coordinator.end()

    async def diagnose(self, failed: FailedRun, loaded: Loaded) -> Conclusion:
        """Collect what every node saw, conclude, and tell the workers what follows."""
        began = time.monotonic()
        while self._coordinator.pending_reports(time.monotonic()) and time.monotonic() - began < END_TIMEOUT:
            await asyncio.sleep(LOOK_EVERY / 4)
        others = [_end_evidence(rank, heard) for rank, heard in self._coordinator.ends.items()]
        others += [
            _lost_evidence(rank, *gone, failed)
            for rank, gone in self._coordinator.lost_workers(time.monotonic()).items()
        ]
        conclusion = await self.diagnosis.diagnose(failed, loaded, others)
        found, recovery = conclusion.diagnosed, conclusion.recovery
        self._coordinator.conclude(
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
        """Conclude a planned restart, unless a diagnosis concluded something else."""
        self._coordinator.conclude_planned()

    def on_gave_up(self, refusal: Refusal) -> None:
        """Tell the workers that the group gave up."""
        self._coordinator.give_up(refusal)

    async def on_exit(self) -> None:
        """Wait until the workers know that it is over."""
        self._coordinator.end()  # begun, and stopped before anything was spawned here
        began = time.monotonic()
        while self._coordinator.unacknowledged(time.monotonic()) and time.monotonic() - began < EXIT_TIMEOUT:
            await asyncio.sleep(LOOK_EVERY)


def _end_evidence(rank: int, heard: ReportedEnd) -> NodeEvidence:
    from ..healing.classify import Observed

    end = heard.end
    # Another version may observe more than this one knows.
    observed = {each.name: end.observed[each.name] for each in fields(Observed) if each.name in end.observed}
    for name in ("xids", "survived"):
        if name in observed:
            observed[name] = tuple(observed[name])
    return NodeEvidence(
        rank, heard.at, end.own, end.lines, Observed(**observed), end.exit_code, end.alarm, end.stages, end.readings
    )


def _lost_evidence(rank: int, at: float, message: str, failed: FailedRun) -> NodeEvidence:
    """A node that went before it could say anything: what our own ranks then say of it is only an echo."""
    from ..healing.classify import Observed

    stage = Stage(failed.run.stage).catalogue
    return NodeEvidence(rank, at, True, (message,), Observed(stage=stage), None, message, {}, {})


def _count(gpus: list[tuple[str, int]]) -> str:
    names = dict.fromkeys(name for name, _ in gpus)
    return " and ".join(f"{sum(name == n for n, _ in gpus)} x {name}" for name in names) or "no GPU"
