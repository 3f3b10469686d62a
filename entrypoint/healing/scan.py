"""Reads a log line by line and keeps what could explain an end: hits of the catalogue's rules with their stage.

Bounded in time and memory for any input: a cheap word filter goes first, long lines are cut, and only the hits that can
still win are kept.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..engine.lines import LONGEST, EvidenceFilter, Line, is_configuration, is_request, unwrap
from ..engine.log import TAXONOMY_STAGE, LogParser, Reading, mark_of
from .causes import Rule, catalogue
from .numbers import files_in, foreign, numbers_in

ORDER = (
    "preflight",
    "download",
    "verify",
    "init",
    "nccl_init",
    "weight_load",
    "kv_alloc",
    "warmup",
    "graph_capture",
    "first_forward",
    "serving",
)
# Lines that differ in digits alone are tried this often; so many are tried at all in one run of an engine, and so many
# more when they are an exception's own line.
SAME_SHAPE, TRIED, TRIED_EXCEPTIONS = 8, 8_000, 4_000
_DIGITS = str.maketrans("123456789", "000000000")
_KNOWN_LINES = 20_000  # repeated lines that are recognised without another look
_FRAMES = 400  # of one traceback
HIT_LIMIT = 4000  # more hits than this are only counted: by then the first fatal text has been seen

# Every rule needs one of these words in its line (a test holds them to the corpus); lower case.
WORDS = (
    "error",
    "exception",
    "fail",
    "fatal",
    "memory",
    "oom",
    "kill",
    "sig",
    "nan",
    "inf",
    "abort",
    "assert",
    "crash",
    "timeout",
    "timed out",
    "time-out",
    "watchdog",
    "xid",
    "cuda",
    "nccl",
    "driver",
    "not ",
    "n't",
    "cannot",
    "can not",
    "no ",
    "unable",
    "unsupported",
    "invalid",
    "missing",
    "mismatch",
    "denied",
    "space",
    "address",
    "port ",
    "lock",
    "corrupt",
    "truncat",
    "incomplete",
    "must",
    "require",
    "only",
    "too ",
    "exit",
    "hang",
    "hung",
    "stuck",
    "stall",
    "dead",
    "freez",
    "frozen",
    "waiting",
    "retract",
    "garb",
    "token",
    "429",
    "401",
    "403",
    "zeros",
    "500",
    "502",
    "503",
    "504",
    "gated",
    "exceed",
    "undefined",
    "found",
    "expected",
    "usage",
    "lost",
    "bus",
    "refused",
    "reset",
    "unreach",
    "offline",
    "mib",
    "gib",
    "gb",
    "bytes",
    "!!!",
    "canary",
    "output",
    "exhaust",
    "enospc",
    "eacces",
    "graph",
    "capture",
    "cache",
    "divisible",
    "conflict",
    "incompatible",
    "exclusive",
    "stop",
    "spec",
    "barrier",
    "health",
    "acs",
    "rpc",
    "unbalanced",
    "occupied",
    "alloc",
    "terminate",
    "select",
    "link down",
    "inaccessible",
    "rate limit",
    "header",
    "eof",
    "version",
    "import",
    "symbol",
    "rejected",
    "remedy",
    "nvcc",
    "ninja",
    "ptxas",
    "nvrtc",
    "traceback",
    "deprecat",
    "client",
    "core dumped",
    "collaps",
    "answer",
    "empty",
    "advanc",
    "fired up",
    "startup",
    "parallel",
    "avail mem",
    "autotune",
    "max_total",
    "load",
    "begin",
    "compil",
    "fetching",
    "throughput",
    "stays",
    "progress",
    "key",
    "acquire",
    "iommu",
    "rapid",
    "later",
    "child",
    "num_expert",
    "broken",
    "gave up",
    "started anew",
    "engine of node",
    "obj=",
    "reqinput",
    "received request",
    "attempted to call",
    "inkling",
    "gigachat",
    "malformed",
    "text",
    "skip",
)

_FRAME = re.compile(r'File "([^"]+)", line \d+, (in \S+)')
_EXCEPTION = re.compile(
    r"^(?:E\s+)?(?:\w+\.)*[A-Za-z]\w*(?:Error|Exception|Interrupt|Exit|Enabled)\b(?:\s*[:(]|$)"
    r"|^\S*[Ff]atal[ :]"
)
_HIT_EXCEPTION = re.compile(r"(?:hit an exception|Traceback \(most recent call last\))")
_SOFT = re.compile(
    r"\b(?:(?<!NCCL )warn(?:ing)?|ignor(?:e|ed|ing)|skip(?:ped|ping)?|fall(?:s|ing)? ?-?back|fallback"
    r"|disabl(?:e|ed|ing)|retrying|recommended|consider|sub-?optimal|deprecated|by default"
    r"|will (?:use|be used|retry|wait))\b|^HINT",
    re.IGNORECASE,
)
# Lines of level INFO and of a library's warning: they tell, they do not fail.
_TOLD = re.compile(
    r"^(?:\S+:\d+: )?(?:\w*Warning: )|\bIgnoring incompatible\b|^Ignore import error|\bSkipping (?:import|tactic)"
    r"|\bNCCL INFO\b|^\[[WI]\d{3,4} [^\]]*(?:TCPStore|ProcessGroup\w*|socket|Utils)\.cpp"
    r"|\b(?:will|may) be slow|\bcan be ignored|\[W:onnxruntime|\| INFO +\||- INFO -|To silence this warning"
)
# What engines warn of and go on without.
_WARNED_OF = frozenset({"image_mismatch", "config_rejected", "unsupported_kernel", "checkpoint_mismatch"})
# Where a request is taken apart, before it reaches the scheduler; and where the engine itself works.
_OF_REQUEST = re.compile(
    r"entrypoints/(?:openai|anthropic|ollama|serve)|entrypoints/(?:http_server|api_server|launcher)|serving_\w+\.py"
    r"|starlette/|fastapi/|uvicorn/protocols|aiohttp/web|jinja2/|chat_template|managers/(?:tokenizer_manager|template)"
    r"|multimodal/processors|PIL/|function_call/|constrained/"
)
_OF_ENGINE = re.compile(
    r"managers/(?:scheduler|tp_worker|detokenizer)|model_executor/|model_runner|run_scheduler_process|engine/core"
    r"|v1/worker|worker/worker|model_loader|launch_server|in (?:load_model|_launch_subprocesses|prepare_server_args)\b"
)
# A process of the engine is over; the exception of a thread or a request alone is not that.
_ENDS = re.compile(
    r"SIGQUIT received|received sigquit|died during initialization|subprocess \S+ .{0,20}crashed|hit an exception"
    r"|segmentation fault|sigsegv|fatal python error|core dumped|terminate called|^killed$|^aborted"
    r"|exit ?code|exited with|ended by signal|engine ?core .{0,40}(?:died|dead|failed|fatal)|EngineDeadError"
    r"|initialization failed|terminated",
    re.IGNORECASE,
)
_WRITTEN_BY_SERVING = re.compile(r"^[^\]]{0,100}\bserving_\w+\.py:\d+\]")
_LIFE = (" batch, #", " batch [", '" 200 OK', "generation throughput: ")
_ACCESS = re.compile(r'"(?:GET|POST|PUT|DELETE|HEAD|OPTIONS|PATCH) \S+ HTTP/[\d.]+"')
_RANK = re.compile(r"\b(?:[Rr]ank|scheduler)[ _=]?(\d+)\b")
_CAPTURE_SIZE = re.compile(r"Capturing (?:batches|num tokens) \((?:bs|num_tokens)=(\d+)")
_AVAILABLE = re.compile(r"avail[ _]mem=(\d+(?:\.\d+)?) ?GB")


class Hit(NamedTuple):
    """One line that a rule knows. ``score``: weight, raised for an exception's own line, lowered for a warning."""

    number: int
    text: str
    rule: Rule
    cause: str
    score: int
    soft: bool
    stage: str | None
    rank: int | None
    life: int = 0  # signs of life that came before it
    told: bool = False  # by a library's warning, or at level INFO


@dataclass
class Boot:
    """What one run of an engine said. ``stages``: writer -> stage; ``latest``: the stage line seen last."""

    stages: dict[str, str] = field(default_factory=dict)
    ranks: dict[str, int | None] = field(default_factory=dict)
    floor: str | None = None
    latest: str | None = None
    ready: bool = False
    hits: list[Hit] = field(default_factory=list)
    ended: bool = False  # a line says that a process is over
    numbers: dict[str, float] = field(default_factory=dict)
    files: dict[str, None] = field(default_factory=dict)
    compiling: bool = False
    activity: str | None = None  # prefill or decode: the last batch line
    died: bool = False  # a process of the engine is over, and the log says so
    marked_at: int = 0  # the last line that said which stage was reached
    ready_at: int = 0  # the line that said READY
    life: int = 0  # lines that only a working engine writes: batches, answered requests
    last_life: int = 0  # the last of them

    def stage_of(self, writer: str) -> str | None:
        own = (self.stages.get(writer) if writer else None) or self.latest
        if self.floor and (own is None or ORDER.index(own) < ORDER.index(self.floor)):
            return self.floor
        return own


class Scanner:
    """Feed every line once; then read ``boots`` (the last one is the run in progress at the end of the log)."""

    def __init__(self) -> None:
        self.boots = [Boot()]
        self.lines = 0  # lines with any text
        self._parser = LogParser()
        self._frames: deque[str] = deque(maxlen=_FRAMES)
        self._trace: Line | None = None
        self._trace_at = 0
        self._seen: dict[str, int] = {}
        self._tried = 0
        self._filter = EvidenceFilter()
        self._known: dict[str, str] = {}

    @property
    def boot(self) -> Boot:
        return self.boots[-1]

    def feed(self, number: int, raw: str) -> None:
        if len(raw) > LONGEST:
            self._feed(number, raw[:LONGEST])
            start = unwrap(raw[:400]).text
            if not is_configuration(start) and not is_request(start):
                self._feed(number, raw[LONGEST:][-LONGEST:])
        else:
            self._feed(number, raw)

    def _feed(self, number: int, raw: str) -> None:
        if not raw or raw.isspace():
            return
        self.lines += 1
        known = self._known.get(raw)
        if known is not None:  # a line of an earlier traceback, or one that says nothing
            if known:
                self._frames.append(known)
            return
        lowered = raw.lower()
        frame = _FRAME.search(raw) if 'file "' in lowered else None
        if frame:
            self._frames.append(f"{frame[1]} {frame[2]}")
            self._remember(raw, self._frames[-1])
        elif "server_args=" in lowered and "server_args=" in unwrap(raw).text[:13]:
            self._new_boot()
        elif not self._is_life(number, raw):
            self._read(number, raw, lowered)

    def _is_life(self, number: int, raw: str) -> bool:
        """Lines of a working engine: batches and answered requests. True when the line is nothing else."""
        if any(sign in raw for sign in _LIFE) and (not self._filter.in_request or self._filter.admits(unwrap(raw))):
            self.boot.life += 1
            self.boot.last_life = number
        if " batch, #" in raw or " batch [" in raw:
            self.boot.activity = "prefill" if "Prefill" in raw else "decode"
            if self.boot.activity == "prefill":
                self.boot.numbers.update(numbers_in(raw, "new_tokens"))
            return True
        return '" 200 OK' in raw or _WRITTEN_BY_SERVING.match(raw) is not None

    def _read(self, number: int, raw: str, lowered: str) -> None:
        if not any(word in lowered for word in WORDS):
            self._remember(raw, "")
            return
        exhausted = True
        for part in raw.split("\r"):
            line = unwrap(part)
            exhausted = line.text != "" and self._filter.admits(line) and self._line(number, line) and exhausted
        if exhausted:
            self._remember(raw, "")

    def _remember(self, raw: str, frame: str) -> None:
        """Note that ``raw`` needs no second look: only the frame that it holds, if any, counts."""
        if len(self._known) < _KNOWN_LINES:
            self._known[raw] = frame

    def _new_boot(self) -> None:
        """sglang prints its configuration once per run: a second time means that it was started again."""
        if self.boot.ended or self.boot.ready:
            self.boots = [*self.boots[-7:], Boot()]
            self._parser, self._trace = LogParser(), None
            self._frames.clear()
            self._known.clear()
            self._seen, self._tried = {}, 0
        self._set("", None, "init")

    def _line(self, number: int, line: Line) -> bool:
        """Read one line; True when lines like it need no look any more."""
        text = line.text
        if self._mark(number, line):
            return False
        if _ACCESS.search(text):
            return False
        if _HIT_EXCEPTION.search(text):
            self._frames.clear()
            self._trace, self._trace_at = line, number
        if "%" in text and "|" in text and "it/s" in text:
            return False
        shape = text.translate(_DIGITS)
        seen = self._seen.get(shape, 0)
        limit = TRIED + (TRIED_EXCEPTIONS if _EXCEPTION.match(text) else 0)
        if seen >= SAME_SHAPE or self._tried >= limit:
            return not _HIT_EXCEPTION.search(text)
        self._seen[shape] = seen + 1
        self._tried += 1
        self._match(number, line)
        return False

    def _mark(self, number: int, line: Line) -> bool:
        """Stage lines and progress bars; True when the line is nothing else."""
        text = line.text
        mark = mark_of(text)
        if mark and self.boot.ready and not self.boot.ended:
            return True  # nothing starts twice in one run: a request's text, or the end of another run's log
        if mark:
            kind, stage = mark
            reached = TAXONOMY_STAGE[stage]
            if kind == "end":
                reached = {"loading": "kv_alloc", "kv_pool": "warmup", "graphs": "warmup"}.get(stage, reached)
            everyone = line.rank is None and stage in ("warmup", "serving")
            self._set(line.writer, line.rank, reached, everyone=everyone)
            self.boot.marked_at = number
            if stage == "serving":
                self.boot.ready, self.boot.ready_at = True, number
            for event in self._parser.feed(text, 0.0):
                if isinstance(event, Reading):
                    worst = min if event.name.startswith("free") or event.name == "baseline_free" else max
                    self.boot.numbers[event.name] = worst(event.value, self.boot.numbers.get(event.name, event.value))
            return True
        return self._foreign_mark(line)

    def _foreign_mark(self, line: Line) -> bool:
        """Stage lines of other engines and of partial logs."""
        text = line.text
        for stage, pattern in catalogue().marks:
            if pattern.search(text):
                if stage == "jit_build":
                    self.boot.compiling = True
                elif self.boot.floor is None or ORDER.index(stage) > ORDER.index(self.boot.floor):
                    self._set(line.writer, line.rank, stage)
                size = _CAPTURE_SIZE.search(text)
                if size:
                    self.boot.numbers["capture_size"] = float(size[1])
                available = _AVAILABLE.search(text)
                if available:
                    self.boot.numbers["free_in_capture"] = float(available[1]) * (1 << 30)
                return stage != "jit_build" and "rror" not in text and "WARN" not in text
        return False

    def _set(self, writer: str, rank: int | None, stage: str, *, everyone: bool = False) -> None:
        boot = self.boot
        boot.stages[writer], boot.ranks[writer], boot.latest = stage, rank, stage
        if everyone:
            boot.floor = stage

    def _match(self, number: int, line: Line) -> None:
        text = line.text
        owner = line if line.writer or line.rank is not None or self._trace is None else self._trace
        reached = self.boot.stage_of(owner.writer)
        frames, lowered = "\n".join(self._frames), text.lower()
        if frames and _OF_REQUEST.search(frames) and not _OF_ENGINE.search(frames):
            # One request failed, and was answered so.
            self.boot.hits = [hit for hit in self.boot.hits if hit.number < self._trace_at - 1]
            return
        shown = _stage_of_frames(frames)
        site, placed = innermost(self._frames), False
        for rule in catalogue().rules:
            if rule.site and (placed or not site or not rule.site.search(site)):
                continue
            if rule.stages and reached and reached not in rule.stages:
                continue
            if not rule.search(text, lowered):
                continue
            if rule.frames and not rule.frames.search(frames):
                continue
            placed |= rule.site is not None
            self._keep(number, text, rule, reached, shown, owner.rank, line.level)

    def _keep(
        self,
        number: int,
        text: str,
        rule: Rule,
        reached: str | None,
        shown: str | None,
        rank: int | None,
        level: str,
    ) -> None:
        boot = self.boot
        if rank is None:
            named = _RANK.search(text)
            rank = int(named[1]) if named else None
        stage = refine(reached, shown, boot.activity if rule.cause == "oom" else None)
        cause = catalogue().resolve(rule.cause, rule.stage or stage)
        exception = bool(_EXCEPTION.search(text))
        low = ("INFO", "DEBUG", "WARNING") if cause in _WARNED_OF else ("INFO", "DEBUG")
        told = (level in low and not cause.startswith("hang")) or bool(_TOLD.search(text))
        soft = not exception and rule.weight < 90 and (told or bool(_SOFT.search(text)))
        score = rule.weight + (10 if exception else 0) - (55 if soft else 0)
        if rule.weight <= 32 and rule.weight > 5 and not soft:
            boot.ended = True
            boot.died |= bool(_ENDS.search(text))
        numbers = numbers_in(text)
        if rule.cause == "oom" and foreign(numbers):
            cause, score = "memory_unbalanced", score + 6
        stage = rule.stage or {"prefill": "serving", "decode": "serving"}.get(stage or "", stage)
        if reached == "first_forward" and stage == "serving":
            stage = "first_forward"
        for name, value in numbers.items():
            boot.numbers.setdefault(name, value)
        if rule.weight > 32:
            boot.files.update(dict.fromkeys(files_in(text)))
        if len(boot.hits) < HIT_LIMIT:
            boot.hits.append(Hit(number, text, rule, cause, score, soft, stage, rank, boot.life, soft and told))


_ENGINES = re.compile(r"(?:^|/)(?:sglang|vllm)/|srt/|tensorrt_llm/")


def innermost(frames: Sequence[str]) -> str:
    """The innermost frame of an engine and the innermost of all, one a line; empty without frames."""
    own = next((frame for frame in reversed(frames) if _ENGINES.search(frame)), "")
    return f"{own}\n{frames[-1]}" if frames else ""


def refine(reached: str | None, shown: str | None, activity: str | None) -> str | None:
    """The stage in which something happened: by the stage lines first, by the traceback where they say too little.

    After start-up the traceback tells prefill from decode, then the last batch line does.
    """
    if reached in (None, "init", "download", "preflight", "verify"):
        return shown or activity or reached
    if reached in ("serving", "first_forward"):
        if shown in ("prefill", "decode") and activity is not None:
            return shown
        if shown == "prefill" and activity is None:
            return reached
        return activity or reached
    if reached == "warmup" and shown == "graph_capture":
        return shown
    return reached


def _stage_of_frames(frames: str) -> str | None:
    if not frames:
        return None
    return next((stage for stage, pattern in catalogue().frames if pattern.search(frames)), None)
