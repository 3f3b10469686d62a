"""After an end: name the cause, ask the ladder, write the post-mortem. The I/O around the pure healing room."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.settings import Loaded
from ..engine.log import TAXONOMY_STAGE
from ..engine.run import Run
from ..errors import EXIT_BY_CAUSE, EXIT_CONFIG, EXIT_GAVE_UP
from ..healing import machine
from ..host.kernel_log import KernelEvidence
from ..plan import Change
from ..state.boots import Boot
from ..state.post_mortems import LAST_LINES, PostMortems
from .logs import Log
from .monitors import Alarm

if TYPE_CHECKING:
    from ..healing.classify import Observed, Verdict
    from ..healing.playbook import Attempt
    from .launch import Prepared


# Of each line in a post-mortem.
LINE_CHARS = 2000


@dataclass(frozen=True)
class FailedRun:
    """One run that ended."""

    run: Run
    prepared: Prepared
    boot: Boot
    alarm: Alarm | None


@dataclass(frozen=True)
class NodeEvidence:
    """What is seen of one node's end. ``at``: its first sign in monotonic seconds; ``own``: False when this node's
    engine was only ended because of another node, and was whole until then; ``alarm``: why the supervisor ended it."""

    node: int
    at: float
    own: bool
    lines: Sequence[str]
    observed: Observed
    exit_code: int | None
    alarm: str | None
    stages: Mapping[str, float]
    readings: Mapping[str, Mapping[str, float]]


def prewarm() -> None:
    """Load what an end needs while there is time: a second of imports and expressions at the moment of a crash would
    keep probes waiting. Blocking: call it from a thread."""
    from ..healing import classify, engine_config, playbook  # noqa: F401
    from ..healing.causes import catalogue

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
        self.node = 0  # where the last failure was
        self._attempts: tuple[Attempt, ...] = ()
        self._stacks: list[str] = []

    def gave_up(self, loaded: Loaded) -> None:
        """The restart budget ended what the ladder would have tried again."""
        if self.last_post_mortem is not None:
            PostMortems(loaded.settings.state_dir).mark_gave_up(self.last_post_mortem)

    def recovered(self) -> None:
        """What was asked for is done: a planned restart later must not do it again."""
        self.repair, self.clear_jit_cache, self.wait_for_memory = None, False, False

    def reached_ready(self) -> None:
        """A start that failed and then went well unchanged is over: it does not count against the next one. What
        was changed stays known, and what happens while serving is not proven away by a start."""
        self._attempts = tuple(a for a in self._attempts if a.changes or a.stage == "serving")

    async def find(self, failed: FailedRun) -> NodeEvidence:
        """What this node saw of its engine's end."""
        await asyncio.to_thread(prewarm)
        run, alarm = failed.run, failed.alarm
        signs = await asyncio.to_thread(run.kernel_evidence.read, run.engine.ever)
        lines = [*run.lines, *signs.lines]
        if alarm is not None and not (alarm.hang or alarm.canary or alarm.group):
            lines.append(alarm.reason)
        return NodeEvidence(
            node=failed.prepared.loaded.settings.node_rank,
            at=run.failure_started_at or time.monotonic(),
            own=alarm is None or not alarm.group or run.engine.failing,
            lines=lines,
            observed=await asyncio.to_thread(self._observe, failed, signs),
            exit_code=run.exit_code,
            alarm=alarm.reason if alarm else None,
            stages={name: round(seconds, 3) for name, seconds in run.stage_seconds().items()},
            readings={name: {str(rank): v for rank, v in ranks.items()} for name, ranks in run.readings.items()},
        )

    async def examine(
        self, failed: FailedRun, loaded: Loaded, others: Sequence[NodeEvidence] = ()
    ) -> machine.Diagnosed:
        """Classify, decide, write the post-mortem. ``others``: what the other nodes of the group saw."""
        findings = (await self.find(failed), *others)
        from ..healing import engine_config, playbook

        finding, verdict = await asyncio.to_thread(self._first, findings)
        self.node = finding.node
        plan = failed.prepared.plan
        assert plan is not None
        decided = playbook.decide(verdict, engine_config.of(plan, loaded), self._attempts)
        now = time.time()
        self._attempts = (*self._attempts, playbook.Attempt(verdict.cause, verdict.stage, decided.changes, now))
        merged = {change.setting: change for change in (*self.changes, *decided.changes)}
        self.changes = tuple(merged.values())
        self.repair = decided.repair if decided.action == "repair_weights" else None
        self.clear_jit_cache = decided.clear_jit_cache
        self.wait_for_memory = decided.wait_for == "gpu_memory"
        await asyncio.to_thread(self._write, failed, loaded, verdict, decided, now, finding, findings)
        where = f" on node {finding.node}" if len(findings) > 1 else ""
        self._log.warning(f"engine ended{where}: {verdict.cause} in stage {verdict.stage}: {verdict.summary}")
        for change in decided.changes:
            self._log.info(f"changing {change.setting} from {change.before} to {change.after}: {change.reason}")
        exit_code = EXIT_BY_CAUSE.get(verdict.cause)
        if exit_code is None:
            exit_code = EXIT_CONFIG if verdict.action == "stop_config" else EXIT_GAVE_UP
        return machine.Diagnosed(
            verdict.cause,
            decided.reason or verdict.summary,
            decided.next_step or verdict.next_step,
            exit_code,
            retry=not decided.give_up,
        )

    @staticmethod
    def _first(findings: Sequence[NodeEvidence]) -> tuple[NodeEvidence, Verdict]:
        """The end that the others follow from, and its cause."""
        from ..healing.classify import Observed, classify
        from ..healing.root_cause import Candidate, first

        def why_followed(finding: NodeEvidence) -> Verdict:
            return classify([finding.alarm or ""], Observed(stage=finding.observed.stage))

        verdicts = {f.node: classify(f.lines, f.observed) if f.own else why_followed(f) for f in findings}
        chosen = first([Candidate(f.node, f.at, f.own, verdicts[f.node]) for f in findings])
        if chosen is not None:
            return next(f for f in findings if f.node == chosen.node), chosen.verdict
        # Nobody's engine failed by itself: a node or the way to it was lost, as the head's own alarm says.
        return findings[0], why_followed(findings[0])

    def _observe(self, failed: FailedRun, signs: KernelEvidence) -> Observed:
        from ..healing.classify import Observed
        from ..host import nvml

        code = failed.run.exit_code
        alarm = failed.alarm
        gpus = [gpu.index for gpu in failed.prepared.inventory.gpus]
        return Observed(
            exit_code=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            hang=alarm.hang if alarm else None,
            stopped=alarm is not None and alarm.stopped,
            canary=alarm.canary if alarm else None,
            stage=TAXONOMY_STAGE.get(failed.run.stage, failed.run.stage),
            oom_kill=signs.oom_kill,
            xids=signs.xids,
            gpus_missing=len(nvml.free_bytes(gpus)) < len(gpus),
        )

    async def dump_stacks(self, run: Run) -> None:
        """Where every process of a hung engine stands, before it is killed."""
        self._stacks = []
        tool = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
        if tool is None:
            return
        for process in run.engine.vital()[:12]:
            child = await asyncio.create_subprocess_exec(
                tool,
                "dump",
                "--nonblocking",
                "--pid",
                str(process.pid),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            try:
                output, _ = await asyncio.wait_for(child.communicate(), 5.0)
                self._stacks += run.scrub(output.decode("utf-8", "replace")).splitlines()[:200]
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()

    def _write(
        self,
        failed: FailedRun,
        loaded: Loaded,
        verdict: Any,
        decided: Any,
        now: float,
        finding: NodeEvidence,
        findings: Sequence[NodeEvidence],
    ) -> None:
        run, plan = failed.run, failed.prepared.plan
        assert plan is not None
        document = {
            **verdict.document(),
            "action": decided.action,
            "boot": failed.boot.id,
            "exit_code": finding.exit_code,
            "changed": [change.document() for change in decided.changes],
            "gave_up": decided.give_up,
            "next_step": decided.next_step or verdict.next_step,
            "reason": decided.reason,
            "alarm": finding.alarm,
            "stages": dict(finding.stages),
            "readings": dict(finding.readings),
            "settings": {d.setting: d.value for d in plan.decisions},
            "engine": {"argv": list(run.engine.argv)},
            "stacks": self._stacks,
            "last_lines": _last(finding),
        }
        if len(findings) > 1:
            document["node"] = finding.node
            document["nodes"] = {str(each.node): _told(each, finding.at) for each in findings}
        self._stacks = []
        self.last_post_mortem = PostMortems(loaded.settings.state_dir).write(now, verdict.cause, document)


def _last(finding: NodeEvidence) -> list[str]:
    return [line[:LINE_CHARS] for line in list(finding.lines)[-LAST_LINES:]]


def _told(finding: NodeEvidence, first: float) -> dict[str, Any]:
    """One node's part of a group's post-mortem; ``after_seconds`` counts from the first failure."""
    return {
        "after_seconds": round(finding.at - first, 3),
        "followed": not finding.own,
        "exit_code": finding.exit_code,
        "alarm": finding.alarm,
        "stages": dict(finding.stages),
        "readings": dict(finding.readings),
        "last_lines": _last(finding),
    }
