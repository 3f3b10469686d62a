"""Names the cause of an end from the engine's log and from what was seen from outside. Pure.

Order of belief: a stop that was asked for; the GPU or the kernel saying that something is gone; our own canary; the
first fatal text of any rank, weighed by how much it says; then exit code and signal, which alone say little: sglang
ends with 137 for almost everything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .causes import catalogue, xid_classes
from .scan import ORDER, Boot, Hit, Scanner

_WITHIN = 10  # scores that lie this near are decided by time
_FLOOR = 10  # below this a hit is harmless
# What goes on although the engine answers.
_LASTING = frozenset({"nan_output", "degenerate_output", "gpu_lost"})
# What is tried again by whoever met it: a later stage shows that it worked.
_RETRIED = frozenset({"hub_unavailable", "hub_rate_limited", "download_stalled"})
_GOES_ON = 20  # signs of life after a failure text: however the run ended later, that text did not end it
_STOPPED = "a process was stopped by a signal from outside"
_TEXT = 300  # characters of an evidence line
_SECRET = re.compile(r"\bhf_[A-Za-z0-9]{8,}|(?i:(?<=bearer )\S+|(?<=api[_-]key[=:])\S+)")


@dataclass(frozen=True)
class Observed:
    """What the supervisor saw. ``exit_code``/``signal`` of the engine's main process; ``oom_kill``: the kernel's or
    the cgroup's out-of-memory counter rose; ``xids``: numbers of Xid lines since the start; ``gpus_missing``: NVML no
    longer knows a GPU; ``hang``: no progress for the patience of the stage; ``compiler_running``: nvcc and friends
    work below us; ``canary``: the last canary failed; ``stage``: the catalogue's stage reached, if known better
    than from the log; ``stopped``: a process was stopped by a signal from outside for too long; ``exposed``: clients
    were served, so that text in the log may be theirs; ``disk_full``: statvfs finds a disk that the engine writes to
    full; ``gpu_memory_low``: NVML saw almost no free memory on a GPU shortly before the end; ``survived``: first and
    last line, counted from 1, that were written while clients were served and before the last proof of health."""

    exit_code: int | None = None
    signal: int | None = None
    oom_kill: bool = False
    xids: tuple[int, ...] = ()
    gpus_missing: bool = False
    hang: Literal["startup", "serving"] | None = None
    compiler_running: bool = False
    canary: Literal["nan", "degenerate"] | None = None
    stage: str | None = None
    stop_requested: bool = False
    stopped: bool = False
    exposed: bool = False
    disk_full: bool = False
    gpu_memory_low: bool = False
    survived: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Evidence:
    """``line`` counts from 1; 0: not from the log but observed."""

    line: int
    text: str


@dataclass(frozen=True)
class Verdict:
    """``rank``: the tensor-parallel rank that failed first, if the log says; ``numbers``: see `numbers.py`;
    ``files``: checkpoint files that the failing lines name; ``outside``: done to the engine, not by it."""

    cause: str
    action: str
    stage: str | None
    rank: int | None
    confidence: float
    evidence: tuple[Evidence, ...]
    summary: str
    next_step: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    outside: bool = False

    def document(self) -> dict[str, Any]:
        """The `explain` document."""
        return {
            "cause": self.cause,
            "action": self.action,
            "stage": self.stage,
            "rank": self.rank,
            "confidence": self.confidence,
            "evidence": [{"line": item.line, "text": item.text} for item in self.evidence],
            "summary": self.summary,
            "next_step": self.next_step,
        }


def classify(lines: Iterable[str], observed: Observed | None = None) -> Verdict:
    """The verdict over ``lines`` (one line each, without line ends) and ``observed``. Never raises on any text."""
    scanner = Scanner()
    for number, line in enumerate(lines, 1):
        scanner.feed(number, line)
    return judge(scanner, observed or Observed())


def judge(scanner: Scanner, observed: Observed) -> Verdict:
    """The verdict of everything that a scanner was fed."""
    first, last = observed.survived
    for each in scanner.boots:
        each.hits = [hit for hit in each.hits if not first <= hit.number <= last]
    boot, earlier = _relevant(scanner)
    best = _first_fatal(boot, scanner.lines, observed)
    outside = _from_outside(boot, best, observed)
    if outside is not None:
        cause, stage, confidence, text = outside
        support = [] if cause == "none" else [hit for hit in boot.hits if hit.cause == cause][:3]
        rank = support[0].rank if support else None
        evidence = (Evidence(0, text), *_evidence(support))
        verdict = _verdict(cause, observed.stage or stage, rank, confidence, evidence, boot)
        return replace(verdict, outside=text == _STOPPED)
    if best is None:
        return _nothing_found(boot, scanner.lines, observed)
    same = [hit for hit in boot.hits if hit.cause == best.cause and hit is not best and not hit.soft]
    confidence = _confidence(best) * (0.9 if earlier else 1.0)
    stage = best.stage or observed.stage or catalogue().causes[best.cause].stage
    evidence = _evidence(sorted({best.number: best, **{hit.number: hit for hit in same[:3]}}.values(), key=_number))
    verdict = _verdict(best.cause, stage, best.rank, round(confidence, 2), evidence, boot)
    advice = [hit.rule.next_step for hit in (best, *same) if hit.rule.next_step]
    return replace(verdict, next_step=advice[0]) if advice else verdict


def _nothing_found(boot: Boot, lines: int, observed: Observed) -> Verdict:
    """The verdict ``none``: the run works and the log shows it, or the log shows neither."""
    past = [hit for hit in boot.hits if hit.cause != "none" and hit.score >= _FLOOR and not hit.soft]
    seen = past[:3] or [hit for hit in boot.hits if hit.cause == "none"][:3]
    stage = observed.stage or boot.stage_of("")
    healthy = boot.ready or boot.life > 0
    verdict = _verdict("none", stage, None, 0.9 if healthy else 0.4, _evidence(seen), boot)
    if not healthy:
        summary = f"nothing in {lines} lines is a known sign of a failure, and none shows that the server works"
        return replace(verdict, summary=summary, next_step="look at the end of the log, or give the whole of it")
    signs = [f"it became ready (line {boot.ready_at})"] if boot.ready else []
    if boot.life:
        signs.append(f"it worked on {boot.life} batches or requests, the last in line {boot.last_life}")
    overcome = "; what failed before that was overcome" if past else "; no failure came after"
    return replace(verdict, summary=f"the engine works: {' and '.join(signs)}{overcome}")


def _relevant(scanner: Scanner) -> tuple[Boot, bool]:
    """The last run; the last that failed when the last one shows nothing and has not become ready."""
    nothing = Observed()
    if not scanner.boot.ready and _first_fatal(scanner.boot, scanner.lines, nothing) is None:
        for boot in reversed(scanner.boots[:-1]):
            if boot.ended and _first_fatal(boot, scanner.lines, nothing) is not None:
                return boot, True
    return scanner.boot, False


def _survived(hit: Hit, boot: Boot, ended: bool) -> bool:
    """Whether the engine went on after ``hit``: it became ready, or worked on."""
    if hit.cause in _LASTING:
        return False
    if ended:
        return boot.life - hit.life >= _GOES_ON
    if hit.cause in _RETRIED and boot.marked_at > hit.number:
        return True
    return boot.ready_at > hit.number or boot.last_life > hit.number


def _first_fatal(boot: Boot, lines: int, observed: Observed) -> Hit | None:
    """The hit that explains the end of ``boot``: of those that say most, the first."""
    ended = boot.died or observed != Observed(stage=observed.stage)
    hits = [hit for hit in boot.hits if hit.score >= (2 * _FLOOR if hit.soft else _FLOOR)]
    hits = [hit for hit in hits if not _survived(hit, boot, ended)]
    hard = [hit for hit in hits if not hit.soft]
    # A warning explains an end, or stands alone in a snippet; it does not condemn a server that goes on.
    candidates = hard or [hit for hit in hits if boot.ended or (lines <= 5 and not hit.told)]
    if not candidates:
        return None
    best = max(hit.score for hit in candidates)
    first = min((hit for hit in candidates if hit.score >= best - _WITHIN), key=lambda hit: (hit.number, -hit.score))
    return None if first.cause == "none" else first


def lost_xids(numbers: Sequence[int]) -> list[int]:
    """Return those of ``numbers`` after which a GPU cannot be used without a reset, a reboot or a new card."""
    kinds = [kind for kind in xid_classes() if kind.name != "ignored"]
    return [number for kind in kinds for number in numbers if number in kind.numbers]


def _from_outside(boot: Boot, best: Hit | None, observed: Observed) -> tuple[str, str | None, float, str] | None:
    """(cause, stage, confidence, evidence) where what was seen from outside decides."""
    stage = observed.stage or boot.stage_of("")
    strong = best is not None and best.score >= 62
    lost = lost_xids(observed.xids)
    if observed.stop_requested:
        return "none", stage, 0.99, "the stop was asked for"
    if observed.gpus_missing or lost:
        return "gpu_lost", stage, 0.97, f"Xid {lost[0]}" if lost else "NVML no longer knows every GPU"
    if observed.oom_kill:
        return "host_oom", stage, 0.97, "the kernel's out-of-memory counter of this cgroup rose"
    if observed.canary == "nan":
        return "nan_output", stage, 0.95, "the canary's log-probabilities are not finite"
    if observed.canary == "degenerate":
        return "degenerate_output", stage, 0.9, "the canary's answer is not the one of a sane run"
    if observed.stopped and not strong:
        return f"hang_{observed.hang or 'serving'}", stage, 0.9, _STOPPED
    if observed.hang and not strong:
        if observed.compiler_running:
            return "none", stage, 0.9, "a compiler is at work"
        hung_in = "serving" if observed.hang == "serving" else _slowest(boot) or stage
        cause = catalogue().resolve("stall", hung_in)
        return cause, observed.stage or hung_in, 0.85, "no progress for the patience of this stage"
    if best is not None and best.score > 24:
        return None
    return _from_exit(stage, best, observed)


def _from_exit(stage: str | None, best: Hit | None, observed: Observed) -> tuple[str, str | None, float, str] | None:
    code, signal = observed.exit_code, observed.signal
    if signal is None and code is not None and (code < 0 or 128 < code < 160):
        signal = -code if code < 0 else code - 128
    if observed.xids and (code or signal):
        return "engine_crash", stage, 0.6, f"Xid {observed.xids[0]}"
    if best is not None and best.cause != "unknown":
        return None
    if signal in (11, 6, 4, 8):
        return catalogue().resolve("crash", stage), stage, 0.5, f"ended by signal {signal}"
    if signal == 7:
        return catalogue().resolve("bus_error", stage), stage, 0.5, "ended by signal 7"
    if signal is not None:
        return "killed", stage, 0.6, f"ended by signal {signal}"
    if code == 2 and stage in (None, "init", "preflight"):
        return "config_rejected", stage or "init", 0.7, "exit code 2: the engine's own usage error"
    if code == 3 and best is None:
        return "port_in_use", stage, 0.5, "exit code 3: the HTTP server could not start"
    if code is not None and best is None:
        return "unknown", stage, 0.4, f"exit code {code} without any text"
    return None


def _slowest(boot: Boot) -> str | None:
    stages = [boot.stage_of(writer) for writer in boot.stages if writer or len(boot.stages) == 1]
    known = [stage for stage in stages if stage is not None]
    return min(known, key=ORDER.index, default=None)


def _confidence(hit: Hit) -> float:
    if hit.cause == "unknown":
        return 0.3
    value = 0.35 + 0.62 * min(max(hit.rule.weight - 10, 0) / 80, 1.0)
    return value * (0.7 if hit.soft else 1.0)


def _evidence(hits: Iterable[Hit]) -> tuple[Evidence, ...]:
    return tuple(Evidence(hit.number, _SECRET.sub("***", hit.text[:_TEXT])) for hit in hits)


def _number(hit: Hit) -> int:
    return hit.number


def _verdict(
    cause: str, stage: str | None, rank: int | None, confidence: float, evidence: tuple[Evidence, ...], boot: Boot
) -> Verdict:
    entry = catalogue().causes[cause]
    numbers = {name: value for name, value in boot.numbers.items() if name != "exit_code" or cause != "none"}
    return Verdict(
        cause,
        entry.action,
        stage or (None if cause == "none" else entry.stage),
        rank,
        round(confidence, 2),
        evidence,
        entry.summary,
        entry.next_step,
        numbers,
        tuple(boot.files),
    )
