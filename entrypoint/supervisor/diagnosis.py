"""After an end: name the cause, ask the playbook what to do, write the post-mortem. The I/O around `healing`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config.settings import Loaded
from ..engine.lines import LEFT_OUT, without_requests
from ..errors import EXIT_BY_CAUSE, EXIT_CONFIG, EXIT_GAVE_UP
from ..healing import events
from ..plan import Change
from ..state.post_mortems import LAST_LINES, PostMortems
from . import evidence
from .evidence import FailedRun, NodeEvidence
from .logs import Log
from .recovery import Recovery

if TYPE_CHECKING:
    from ..healing.classify import Verdict
    from ..healing.playbook import Attempt
    from ..healing.remediation import Remediation

# Ends that say nothing about the state of a GPU, unless the log or the kernel does.
WARM_CAUSES = frozenset({"killed", "engine_crash", "hang_serving", "host_oom", "unknown"})
_GPU_ERRORS = ("CUDA error", "cudaError", "CUBLAS_STATUS", "NCCL error", "Xid")
# Characters of each line in a post-mortem.
LINE_CHARS = 2000


@dataclass(frozen=True)
class Conclusion:
    """What a diagnosis concluded. ``node``: where the first failure was. ``changes``: everything that healing has
    changed so far in this supervisor's life. ``post_mortem``: the file that tells of it, None where another node
    writes it. ``cold``: the state of a GPU is in doubt, so that only a start from nothing is right."""

    diagnosed: events.Diagnosed
    recovery: Recovery
    node: int = 0
    changes: tuple[Change, ...] = ()
    post_mortem: str | None = None
    cold: bool = True


class Diagnosis:
    """Concludes what an end was. Remembers what was tried before, since the playbook's answer depends on it."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._changes: tuple[Change, ...] = ()
        self._attempts: tuple[Attempt, ...] = ()

    def on_ready(self) -> None:
        """Forget the starts that failed and then went well unchanged: they do not count against the next one. What
        was changed is remembered, and so is what happened while serving, which no start disproves."""
        self._attempts = tuple(a for a in self._attempts if a.changes or a.stage == "serving")

    async def diagnose(self, failed: FailedRun, loaded: Loaded, others: Sequence[NodeEvidence] = ()) -> Conclusion:
        """Classify the end, decide what to do, write the post-mortem. ``others``: what other nodes of the group saw."""
        findings = (await evidence.collect(failed), *others)
        from ..healing import engine_config, playbook

        root, verdict = await asyncio.to_thread(root_cause, findings)
        decided = playbook.decide(verdict, engine_config.of(failed.planned.plan, loaded), self._attempts)
        now = time.time()
        self._attempts = (*self._attempts, playbook.Attempt(verdict.cause, verdict.stage, decided.changes, now))
        self._changes = tuple({change.setting: change for change in (*self._changes, *decided.changes)}.values())
        document = _post_mortem(failed, verdict, decided, root, findings)
        store = PostMortems(loaded.settings.state_dir)
        written = await asyncio.to_thread(store.write, now, verdict.cause, document)
        where = f" on node {root.node}" if len(findings) > 1 else ""
        self._log.warning(f"engine ended{where}: {verdict.cause} in stage {verdict.stage}: {verdict.summary}")
        for change in decided.changes:
            self._log.info(f"changing {change.setting} from {change.before} to {change.after}: {change.reason}")
        exit_code = EXIT_BY_CAUSE.get(verdict.cause)
        if exit_code is None:
            exit_code = EXIT_CONFIG if verdict.action == "stop_config" else EXIT_GAVE_UP
        return Conclusion(
            events.Diagnosed(
                verdict.cause,
                decided.reason or verdict.summary,
                decided.next_step or verdict.next_step,
                exit_code,
                retry=not decided.give_up,
            ),
            Recovery(
                repair=decided.repair if decided.action == "repair_weights" else None,
                clear_jit_cache=decided.clear_jit_cache,
                wait_for_memory=decided.wait_for == "gpu_memory",
            ),
            root.node,
            self._changes,
            written,
            cold=verdict.cause not in WARM_CAUSES or _names_the_gpu(root),
        )


def root_cause(findings: Sequence[NodeEvidence]) -> tuple[NodeEvidence, Verdict]:
    """Return the end that the others follow from, and its cause. Blocking: it scans thousands of lines."""
    from ..healing.classify import Observed, classify
    from ..healing.root_cause import Candidate, first
    from ..healing.witness import confirm

    def why_ended(finding: NodeEvidence) -> Verdict:
        return classify([finding.alarm or ""], Observed(stage=finding.observed.stage))

    verdicts = {f.node: classify(f.lines, f.observed) if f.own else why_ended(f) for f in findings}
    chosen = first([Candidate(f.node, f.at, f.own, verdicts[f.node]) for f in findings])
    if chosen is not None:
        root = next(f for f in findings if f.node == chosen.node)
        # Only now: which end follows from which is told by what the logs say.
        return root, confirm(chosen.verdict, root.observed)
    # No engine failed by itself: a node or the network to it was lost, as the head's own alarm says.
    return findings[0], why_ended(findings[0])


def _post_mortem(
    failed: FailedRun,
    verdict: Verdict,
    decided: Remediation,
    root: NodeEvidence,
    findings: Sequence[NodeEvidence],
) -> dict[str, Any]:
    """The document that `relaunch history` shows."""
    lines = without_requests(root.lines)
    told = verdict.document()
    for item in told["evidence"]:
        if 0 < item["line"] <= len(lines) and lines[item["line"] - 1] is LEFT_OUT:
            item["text"] = LEFT_OUT
    document = {
        **told,
        "action": decided.action,
        "boot": failed.boot.id,
        "exit_code": root.exit_code,
        "changed": [change.document() for change in decided.changes],
        "gave_up": decided.give_up,
        "next_step": decided.next_step or verdict.next_step,
        "reason": decided.reason,
        "alarm": root.alarm,
        "stages": dict(root.stages),
        "readings": dict(root.readings),
        "settings": {d.setting: d.value for d in failed.planned.plan.decisions},
        "engine": {"argv": failed.planned.command.shown()},
        "stacks": list(failed.stacks),
        "last_lines": _last_lines(lines),
    }
    if len(findings) > 1:
        document["node"] = root.node
        document["nodes"] = {str(each.node): _node_document(each, root.at) for each in findings}
    return document


def _names_the_gpu(finding: NodeEvidence) -> bool:
    """Return True when the end came with an error of a GPU, which may outlive the process (sticky errors, Xid)."""
    lines = list(finding.lines)[-LAST_LINES:]
    return bool(finding.observed.xids) or any(error in line for line in lines for error in _GPU_ERRORS)


def _last_lines(lines: Sequence[str]) -> list[str]:
    """The end of a log that holds no requests any more."""
    return [line[:LINE_CHARS] for line in lines[-LAST_LINES:]]


def _node_document(finding: NodeEvidence, first: float) -> dict[str, Any]:
    """One node in a group's post-mortem. ``first``: when the first failure was, in monotonic seconds."""
    return {
        "after_seconds": round(finding.at - first, 3),
        "followed": not finding.own,
        "exit_code": finding.exit_code,
        "alarm": finding.alarm,
        "stages": dict(finding.stages),
        "readings": dict(finding.readings),
        "last_lines": _last_lines(without_requests(finding.lines)),
    }
