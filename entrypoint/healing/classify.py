"""Names the cause of an end from the engine's log and from what was seen from outside. Pure.

Order of belief: a stop that was asked for; the GPU or the kernel saying that something is gone; our own canary; the
first fatal text of any rank, weighed by how much it says; then exit code and signal, which alone say little: sglang
ends with 137 for almost everything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..engine.lines import unwrap
from .causes import catalogue
from .lifecycle import Hit, Run
from .scan import Scanner
from .unfold import unwrapped

_WITHIN = 10  # scores that lie this near are decided by time
_FLOOR = 10  # below this a hit is harmless
ONLY_THAT_IT_ENDED = 33  # scores up to this say that something ended, not why
KERNEL_SAYS = 96  # weights from this on are records of the kernel
STRONG = 62  # from this score on a text names a cause, and the exit code adds nothing
WEAK = 24  # up to this score a text says less than the exit code
HEALTHY, NOTHING, CONFIDENCE_IN_EARLIER_RUN = 0.9, 0.6, 0.9
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
    """The verdict over ``lines`` (one line each, without line ends) and ``observed``. Never raises on any text.

    With ``observed`` the lines are those of one run, which the caller has seen end; without, a log that may hold many.
    """
    scanner = Scanner(one_run=observed is not None)
    for number, line in unwrapped(lines):
        scanner.feed(number, line)
    return judge(scanner, observed or Observed())


def judge(scanner: Scanner, observed: Observed) -> Verdict:
    """The verdict of everything that a scanner was fed."""
    scanner.end()
    first, last = observed.survived
    for each in scanner.runs:
        each.hits = [hit for hit in each.hits if not first <= hit.number <= last]
    run, earlier = _relevant(scanner)
    best = _first_failure(run, over=observed.exit_code is not None or observed.signal is not None)
    outside = _from_outside(run, best, observed)
    if outside is not None:
        cause, stage, confidence, text = outside
        support = [] if cause == "none" else [hit for hit in run.hits if hit.cause == cause][:3]
        rank = support[0].rank if support else None
        evidence = (Evidence(0, text), *_evidence(support))
        verdict = _verdict(cause, observed.stage or stage, rank, confidence, evidence, run)
        return replace(verdict, outside=text == _STOPPED)
    if best is None:
        return _nothing(scanner, run, observed)
    same = [hit for hit in run.hits if hit.cause == best.cause and hit is not best and not hit.soft]
    confidence = _confidence(best) * (CONFIDENCE_IN_EARLIER_RUN if earlier else 1.0)
    stage = best.stage or observed.stage or catalogue().causes[best.cause].stage
    evidence = _evidence(sorted({best.number: best, **{hit.number: hit for hit in same[:3]}}.values(), key=_number))
    verdict = _verdict(best.cause, stage, best.rank, round(confidence, 2), evidence, run)
    return replace(verdict, next_step=best.next_step) if best.next_step else verdict


def _nothing(scanner: Scanner, run: Run, observed: Observed) -> Verdict:
    """No failure: the engine is healthy, or it was on its way, or nothing was recognised. Three different answers."""
    seen = [hit for hit in run.hits if hit.cause == "none" or hit.of_request][:3]
    stage = observed.stage or run.stage_of("")
    if run.ready or run.answered or run.computed:
        proof = [(run.ready, run.ready_text), (run.answered, run.answered_text)]
        evidence = tuple(Evidence(number, _clean(unwrap(text).text)) for number, text in proof if number)
        summary = ("healthy until it was told to stop: " if run.stopping else "healthy: ") + ", ".join(
            [f"ready in line {run.ready}"] * bool(run.ready)
            + [f"{run.answers} requests answered, the last in line {run.answered}"] * bool(run.answered)
            + [f"the last batch in line {run.computed}"] * bool(run.computed)
        )
        own = [hit for hit in run.hits if hit.cause != "none" and not (hit.soft or hit.of_request)]
        past = [hit for hit in own if hit.score >= _FLOOR and run.survived(hit)]
        after = "what failed before that was overcome" if past else "no failure after that"
        verdict = _verdict("none", stage, None, HEALTHY, (*evidence, *_evidence(past[:3] or seen)), run)
        return replace(verdict, summary=f"{summary}; {after}")
    verdict = _verdict("none", stage, None, NOTHING, _evidence(seen), run)
    if seen:
        return replace(verdict, summary="no failure of the engine: only warnings, or faults of single requests")
    if run.advances:
        summary = (
            f"no failure up to line {run.advances[-1][0]}, where the engine had reached {stage}; the log ends there"
        )
        return replace(
            verdict, summary=summary, next_step="if the engine is gone, look at what ended it: `dmesg`, the container"
        )
    return replace(
        verdict,
        summary=f"nothing recognised in {scanner.lines} lines: neither a failure nor a sign of health",
        next_step="give the log of the engine from its start to its end, all ranks; this is no proof of health",
    )


def _relevant(scanner: Scanner) -> tuple[Run, bool]:
    """The last run, or the last that failed when the last one shows nothing yet."""
    last = scanner.run
    if not (last.ready or last.lives) and _first_failure(last) is None:
        for run in reversed(scanner.runs[:-1]):
            if run.ended and _first_failure(run) is not None:
                return run, True
    return last, False


def _first_failure(run: Run, *, over: bool = False) -> Hit | None:
    """The first failure on the way to the end: of what the engine did not survive, the most telling.

    A warning explains an end, and so does what the engine survived at first; neither condemns a server that goes on.
    ``over``: the run is known to have ended, whether its log says so or not.
    """
    own = [hit for hit in run.hits if not hit.of_request and hit.score >= _FLOOR and not run.asked_for(hit)]
    candidates = [hit for hit in own if not hit.soft and not run.survived(hit)]
    if (over or run.ended > run.ready) and max((hit.score for hit in candidates), default=0) <= ONLY_THAT_IT_ENDED:
        late = [hit for hit in own if hit.number > run.ready and not run.outlived(hit)]
        candidates += [hit for hit in late if run.ended > run.ready or not hit.soft]
    if not candidates:
        return None
    # The kernel's word counts before everything that processes say of it.
    candidates = [hit for hit in candidates if hit.meaning.weight >= KERNEL_SAYS] or candidates
    best = max(hit.score for hit in candidates)
    first = min((hit for hit in candidates if hit.score >= best - _WITHIN), key=lambda hit: (hit.number, -hit.score))
    return None if first.cause == "none" else first


def lost_xids(numbers: Iterable[int]) -> list[int]:
    """Return those after which a GPU is of no use before somebody acts, in order."""
    return sorted(number for number in numbers if catalogue().xids.get(number) in ("reset", "reboot", "service"))


def _from_outside(run: Run, best: Hit | None, observed: Observed) -> tuple[str, str | None, float, str] | None:
    """(cause, stage, confidence, evidence) where what was seen from outside decides."""
    stage = observed.stage or run.stage_of("")
    strong = best is not None and best.score >= STRONG
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
        hung_in = "serving" if observed.hang == "serving" else run.slowest() or stage
        cause = catalogue().resolve("stall", hung_in)
        return cause, observed.stage or hung_in, 0.85, "no progress for the patience of this stage"
    if best is not None and best.score > WEAK:
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


def _confidence(hit: Hit) -> float:
    if hit.cause == "unknown":
        return 0.3
    value = 0.35 + 0.62 * min(max(hit.meaning.weight - 10, 0) / 80, 1.0)
    return value * (0.7 if hit.soft else 1.0)


def _evidence(hits: Iterable[Hit]) -> tuple[Evidence, ...]:
    return tuple(Evidence(hit.number, _clean(hit.text)) for hit in hits)


def _clean(text: str) -> str:
    return _SECRET.sub("***", text[:_TEXT])


def _number(hit: Hit) -> int:
    return hit.number


def _verdict(
    cause: str, stage: str | None, rank: int | None, confidence: float, evidence: tuple[Evidence, ...], run: Run
) -> Verdict:
    entry = catalogue().causes[cause]
    numbers = {name: value for name, value in run.numbers.items() if name != "exit_code" or cause != "none"}
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
        tuple(run.files),
    )
