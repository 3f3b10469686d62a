"""The loops that watch a run: stalls while it starts, hangs and insane answers while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..config.schema import Settings
from ..control.status import Status
from ..engine import canary
from ..engine.canary import Failure
from ..engine.client import EngineClient
from ..engine.log import Progress, StageBegun, StageEnded
from ..engine.run import Run
from ..engine.watchdog import HangDetector, StartupWatchdog, StoppedWatch, Ticks

# Seconds between two looks at the counters, and at most this share of HANG_TIMEOUT: they alone say that tokens are
# computed, since a line of the log can be a client's.
METRICS_EVERY = 5.0
METRICS_SHARE = 0.1
# A canary that failed is asked again before anything is believed of it.
CANARY_TRIES = 2


@dataclass(frozen=True)
class Alarm:
    """Why the supervisor ends an engine. ``hang``: in which of the two times; ``canary``: what was wrong with the
    answer; ``group``: the engine is ended because of another node. At most one of the three is set; with none the
    ``reason`` is all that is known. ``stopped``: the hang is that of a process stopped by a signal."""

    reason: str
    hang: Literal["startup", "serving"] | None = None
    canary: Failure | None = None
    group: bool = False
    stopped: bool = False


async def watch_start(
    run: Run, settings: Settings, seen: Callable[[], object | None], seconds_since_peer_progress: Callable[[], float]
) -> Alarm:
    """Return when start-up is stuck. ``seen`` gives the newest log event since the last call, or None. Progress of
    another node counts too, since ranks wait for each other."""
    watchdog = StartupWatchdog(settings.stage_stall_timeout, time.monotonic())
    stopped = StoppedWatch(settings.hang_timeout)
    heard = 0
    ticks = Ticks(1.0, time.monotonic())
    while True:
        await asyncio.sleep(1.0)
        now = time.monotonic()
        if gap := ticks.gap(now):
            watchdog.shift(gap)
            stopped.shift(gap)
        if isinstance(seen(), Progress | StageBegun | StageEnded) or run.heard != heard:
            watchdog.progress(now)
        heard = run.heard
        engine = run.engine
        watchdog.elsewhere(now - seconds_since_peer_progress())
        halted = stopped.check(now, engine.tree.stopped())
        reason = halted or watchdog.check(now, run.stage, engine.tree.compiling(), engine.tree.bytes_read())
        run.active = watchdog.last
        if reason:
            return Alarm(reason, hang="startup", stopped=halted is not None)


class WorkerMonitor:
    """Watches what a worker of a group can see by itself: its processes. The rest is seen by the head."""

    reference: tuple[float, ...] = ()

    def __init__(self, run: Run, settings: Settings) -> None:
        self._run, self._stopped = run, StoppedWatch(settings.hang_timeout)

    async def watch(self) -> Alarm:
        """Return when a process has been stopped for too long."""
        ticks = Ticks(1.0, time.monotonic())
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            self._stopped.shift(ticks.gap(now))
            reason = self._stopped.check(now, self._run.engine.tree.stopped())
            if reason:
                return Alarm(reason, hang="serving", stopped=True)


class ServingMonitor:
    """Watches a serving run until something is wrong with it."""

    def __init__(
        self,
        run: Run,
        settings: Settings,
        client: EngineClient,
        kind: canary.Kind,
        status: Status,
        reference: tuple[float, ...],
    ) -> None:
        self._run, self._settings, self._client, self._kind, self._status = run, settings, client, kind, status
        self.reference = reference
        self._hang_detector = HangDetector(settings.hang_timeout, settings.canary, time.monotonic())
        self._stopped = StoppedWatch(settings.hang_timeout)
        self._tokens: float | None = None
        self._heard = 0  # lines of the log at the last look at the counters
        self._busy = False
        self._liveness: asyncio.Task[None] | None = None
        self._canary: asyncio.Task[canary.CanaryResult | None] | None = None

    async def watch(self) -> Alarm:
        """Return at the first hang or insane answer."""
        metrics: asyncio.Task[None] | None = None
        next_metrics = now = time.monotonic()
        metrics_every = min(METRICS_EVERY, self._settings.hang_timeout * METRICS_SHARE)
        next_canary = now + self._settings.canary_interval
        ticks = Ticks(1.0, now)
        try:
            while True:
                await asyncio.sleep(1.0)
                now = time.monotonic()
                if gap := ticks.gap(now):
                    self._hang_detector.shift(gap)
                    self._stopped.shift(gap)
                self._status.hang_checks += 1
                if self._run.engine.tree.compiling():
                    self._hang_detector.compiling(now)
                if now >= next_metrics and _over(metrics):
                    metrics = asyncio.create_task(self._metrics())
                    next_metrics = now + metrics_every
                if _over(self._liveness) and self._hang_detector.wants_liveness_request(now):
                    self._liveness = asyncio.create_task(self._send_liveness_request())
                if self._canary is not None and self._canary.done():
                    verdict, self._canary = self._canary.result(), None
                    if verdict is not None and verdict.failure:
                        return Alarm(verdict.detail, canary=verdict.failure)
                if self._settings.canary and now >= next_canary and not self._busy and self._canary is None:
                    self._canary = asyncio.create_task(self.ask_canary())
                    next_canary = now + self._settings.canary_interval
                stopped = self._run.engine.tree.stopped()
                halted = self._stopped.check(now, stopped)
                reason = halted or self._hang_detector.check(now)
                if reason:
                    return Alarm(reason, hang="serving", stopped=halted is not None)
                self._show(now, stopped)
        finally:
            for task in (metrics, self._liveness, self._canary):
                if task is not None:
                    task.cancel()

    def _show(self, now: float, stopped: list[str]) -> None:
        """No balancer should send more to an engine that is under suspicion."""
        if stopped:
            self._status.reason = f"{', '.join(stopped)} is stopped by a signal"
        elif self._hang_detector.suspicious(now):
            self._status.reason = "the engine's HTTP server does not answer"
        else:
            self._status.reason = None
        self._status.healthy = self._status.reason is None

    async def ask_canary(self) -> canary.CanaryResult | None:
        """Ask until sane, at most CANARY_TRIES times. None: no answer came; the hang rules see to that."""
        import httpx

        verdict: canary.CanaryResult | None = None
        for _ in range(CANARY_TRIES):
            self._status.canary_runs += 1
            heard = self._run.heard
            try:
                answer = await self._client.ask(
                    canary.request(self._kind), embedding=self._kind.embedding, timeout=self._settings.hang_timeout / 2
                )
            except (httpx.HTTPError, ValueError):
                return None
            self._hang_detector.tokens(time.monotonic())
            try:
                verdict = canary.judge(self._kind, answer, self.reference)
            except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
                verdict = canary.CanaryResult("degenerate", f"the answer has not the form of an answer: {error}")
            if verdict.failure is None:
                self.reference = verdict.reference
                self._run.prove_healthy(heard)
                return verdict
            self._status.canary_failures += 1
        return verdict

    async def _metrics(self) -> None:
        import httpx

        with contextlib.suppress(httpx.HTTPError, ValueError):
            scrape = await self._client.scrape()
            self._status.serving.add(scrape)
            self._hang_detector.metrics_answered(scrape.at, scrape.waiting)
            self._busy = scrape.waiting > 0
            if self._tokens is not None and scrape.tokens != self._tokens:
                self._hang_detector.tokens(scrape.at)
                self._run.prove_healthy(self._heard)  # it computed after the last look
            self._tokens, self._heard = scrape.tokens, self._run.heard

    async def _send_liveness_request(self) -> None:
        import httpx

        self._hang_detector.liveness_request_sent(time.monotonic())
        answered, heard = False, self._run.heard
        try:
            # Longer than the watchdog's own timeout: it decides, and an engine that computes for others may.
            await self._client.ask(
                canary.liveness_request(self._kind),
                embedding=self._kind.embedding,
                timeout=self._settings.hang_timeout * 4,
            )
            answered = True
            self._run.prove_healthy(heard)
        except (httpx.HTTPError, ValueError):
            await asyncio.sleep(1.0)
        finally:
            self._hang_detector.liveness_request_ended(time.monotonic(), answered)


def _over(task: asyncio.Task[None] | None) -> bool:
    return task is None or task.done()
