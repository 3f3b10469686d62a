"""After an end: name the cause, ask the ladder, write the post-mortem. The I/O around the pure healing room."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .engine.host_signs import Signs
from .engine.log import TAXONOMY_STAGE
from .engine.run import Run
from .errors import EXIT_BY_CAUSE, EXIT_CONFIG, EXIT_GAVE_UP
from .healing import machine
from .logs import Log
from .plan import Change
from .settings import Loaded
from .state.boots import Boot
from .state.post_mortems import LAST_LINES, PostMortems
from .watching import Alarm

if TYPE_CHECKING:
    from .healing.classify import Observed
    from .healing.ladder import Attempt
    from .launch import Prepared


# Of each line in a post-mortem.
LINE_CHARS = 2000


@dataclass(frozen=True)
class Patient:
    """One run that ended."""

    run: Run
    prepared: Prepared
    boot: Boot
    alarm: Alarm | None


def prewarm() -> None:
    """Load what an end needs while there is time: a second of imports and expressions at the moment of a crash would
    keep probes waiting. Blocking: call it from a thread."""
    from .healing import classify, facts, ladder  # noqa: F401
    from .healing.causes import catalogue

    catalogue()


class Diagnosis:
    """``changes``: what healing has changed so far in this supervisor's life."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.changes: tuple[Change, ...] = ()
        # Files to fetch again; empty: whatever a full check finds; None: nothing to repair.
        self.repair: tuple[str, ...] | None = None
        self.clear_jit_cache = False
        self.wait_for_memory = False
        self.last_post_mortem: str | None = None
        self._attempts: tuple[Attempt, ...] = ()
        self._stacks: list[str] = []

    def gave_up(self, loaded: Loaded) -> None:
        """The restart budget ended what the ladder would have tried again."""
        if self.last_post_mortem is not None:
            PostMortems(loaded.settings.state_dir).mark_gave_up(self.last_post_mortem)

    def reached_ready(self) -> None:
        """A start that failed and then went well unchanged is over: it does not count against the next one. What
        was changed stays known, and what happens while serving is not proven away by a start."""
        self._attempts = tuple(a for a in self._attempts if a.changes or a.stage == "serving")

    async def examine(self, patient: Patient, loaded: Loaded) -> machine.Diagnosed:
        """Classify, decide, write the post-mortem."""
        await asyncio.to_thread(prewarm)
        from .healing import classify, facts, ladder

        run = patient.run
        signs = await asyncio.to_thread(run.signs.read, run.engine.ever)
        observed = await asyncio.to_thread(self._observe, patient, signs)
        lines = [*run.lines, *signs.lines]
        if patient.alarm is not None and not patient.alarm.hang and not patient.alarm.canary:
            lines.append(patient.alarm.reason)
        verdict = await asyncio.to_thread(classify.classify, lines, observed)
        plan = patient.prepared.plan
        assert plan is not None
        decided = ladder.decide(verdict, facts.of(plan, loaded), self._attempts)
        now = time.time()
        self._attempts = (*self._attempts, ladder.Attempt(verdict.cause, verdict.stage, decided.changes, now))
        merged = {change.setting: change for change in (*self.changes, *decided.changes)}
        self.changes = tuple(merged.values())
        self.repair = decided.repair if decided.action == "repair_weights" else None
        self.clear_jit_cache = decided.clear_jit_cache
        self.wait_for_memory = decided.wait_for == "gpu_memory"
        await asyncio.to_thread(self._write, patient, loaded, verdict, decided, now)
        self._log.warning(f"engine ended: {verdict.cause} in stage {verdict.stage}: {verdict.summary}")
        for change in decided.changes:
            self._log.info(f"changing {change.setting} from {change.before} to {change.after}: {change.reason}")
        exit_code = EXIT_BY_CAUSE.get(verdict.cause)
        if exit_code is None:
            exit_code = EXIT_CONFIG if verdict.action == "stop_config" else EXIT_GAVE_UP
        return machine.Diagnosed(
            verdict.cause, decided.reason or verdict.summary, decided.next_step or verdict.next_step, exit_code,
            retry=not decided.give_up,
        )  # fmt: skip

    def _observe(self, patient: Patient, signs: Signs) -> Observed:
        from .engine import gpu_memory
        from .healing.classify import Observed

        code = patient.run.exit_code
        alarm = patient.alarm
        gpus = [gpu.index for gpu in patient.prepared.inventory.gpus]
        return Observed(
            exit_code=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            hang=alarm.hang if alarm else None,
            canary=alarm.canary if alarm else None,
            stage=TAXONOMY_STAGE.get(patient.run.stage, patient.run.stage),
            oom_kill=signs.oom_kill,
            xids=signs.xids,
            gpus_missing=len(gpu_memory.free_bytes(gpus)) < len(gpus),
        )

    async def dump_stacks(self, run: Run) -> None:
        """Where every process of a hung engine stands, before it is killed."""
        self._stacks = []
        tool = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
        if tool is None:
            return
        for process in run.engine.vital()[:12]:
            child = await asyncio.create_subprocess_exec(
                tool, "dump", "--nonblocking", "--pid", str(process.pid),
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            try:
                output, _ = await asyncio.wait_for(child.communicate(), 5.0)
                self._stacks += run.scrub(output.decode("utf-8", "replace")).splitlines()[:200]
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()

    def _write(self, patient: Patient, loaded: Loaded, verdict: Any, decided: Any, now: float) -> None:
        run, plan = patient.run, patient.prepared.plan
        assert plan is not None
        document = {
            **verdict.document(),
            "action": decided.action,
            "boot": patient.boot.id,
            "exit_code": run.exit_code,
            "changed": [change.document() for change in decided.changes],
            "gave_up": decided.give_up,
            "next_step": decided.next_step or verdict.next_step,
            "reason": decided.reason,
            "alarm": patient.alarm.reason if patient.alarm else None,
            "stages": {name: round(seconds, 3) for name, seconds in run.stage_seconds().items()},
            "readings": {name: {str(rank): v for rank, v in ranks.items()} for name, ranks in run.readings.items()},
            "settings": {d.setting: d.value for d in plan.decisions},
            "engine": {"argv": list(run.engine.argv)},
            "stacks": self._stacks,
            "last_lines": [line[:LINE_CHARS] for line in list(run.lines)[-LAST_LINES:]],
        }
        self._stacks = []
        self.last_post_mortem = PostMortems(loaded.settings.state_dir).write(now, verdict.cause, document)
