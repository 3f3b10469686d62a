"""What became of an engine in its log: stages, proof of health, ends. Known before any failure text is judged. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from ..engine.lines import Line, is_configuration
from ..engine.log import LogParser, Reading, Stage, StageBegun, StageEnded, mark_of
from .causes import Meaning, catalogue

# The catalogue's stages in the order in which a start goes through them.
STAGE_ORDER = ("preflight", "download", "verify", *(stage.catalogue for stage in Stage))
GOES_ON = 20  # signs of life after a failure text: however the run ended later, that text did not end it
LASTING = frozenset({"gpu_lost", "nan_output", "degenerate_output"})  # goes on although the engine answers
_CAPTURE_SIZE = re.compile(r"Capturing (?:batches|num tokens) \((?:bs|num_tokens)=(\d+)")
_AVAILABLE = re.compile(r"avail[ _]mem=(\d+(?:\.\d+)?) ?GB")
_GIB = float(1 << 30)


class Hit(NamedTuple):
    """An incident that a meaning knows. ``score``: the meaning's weight, raised for an exception; ``soft``: a warning;
    ``of_request``: a fault of one request; ``fatal``: an engine process does not survive it."""

    number: int
    text: str
    meaning: Meaning
    cause: str
    score: int
    soft: bool
    of_request: bool
    fatal: bool
    stage: str | None
    rank: int | None
    next_step: str | None
    lives: int  # signs of life of the run so far


@dataclass
class Run:
    """One run of an engine, as its log tells it. Line numbers count from 1, 0 means never.

    ``ready``: it said that it serves; ``answered``: a request was answered, ``answers`` how many; ``ended``: a line
    says that a process is over; ``stopping``: it was told to stop and took its time; ``advances``: (line, place in
    STAGE_ORDER) of everything that went on.
    """

    parser: LogParser = field(default_factory=LogParser)
    floor: str | None = None
    latest: str | None = None
    ready: int = 0
    ready_text: str = ""
    answered: int = 0
    answered_text: str = ""
    answers: int = 0
    ended: int = 0
    stopping: int = 0
    advances: list[tuple[int, int]] = field(default_factory=list)
    hits: list[Hit] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    files: dict[str, None] = field(default_factory=dict)
    compiling: bool = False
    activity: str | None = None  # prefill or decode: the last batch line
    computed: int = 0  # its number
    lives: int = 0  # batches and answered requests

    def stage_of(self, writer: str) -> str | None:
        """The catalogue's stage in which ``writer`` is."""
        own = self.parser.span_of(writer) if writer else None
        own = own or self.latest
        if self.floor and (own is None or STAGE_ORDER.index(own) < STAGE_ORDER.index(self.floor)):
            return self.floor
        return own

    def slowest(self) -> str | None:
        """The stage of the least advanced writer: the others wait for it."""
        known = [stage for writer in self.parser.writers() if (stage := self.stage_of(writer))]
        return min(known, key=STAGE_ORDER.index, default=self.stage_of(""))

    def read(self, number: int, line: Line) -> bool:
        """Take in a line's marks; True when the line is nothing but a mark."""
        text = line.text
        lowered = text[:400].lower()
        subject = catalogue().subject
        if subject["answered"].search(lowered):
            self.answer(number, text)
        if subject["stopping"].search(lowered):
            self.stopping = self.stopping or number
        if self.ready and not self.ended and self.parser.fired_up:
            return False  # stage lines of an engine that serves are not its own
        if mark_of(text):
            self._mark(number, line)
            return True
        return self._foreign(number, text)

    def answer(self, number: int, text: str) -> None:
        """A request was answered."""
        self.answered, self.answered_text, self.answers = number, text, self.answers + 1
        self.lives += 1

    def survived(self, hit: Hit) -> bool:
        """Whether the engine went on after ``hit``: it became ready, worked, or reached a later stage."""
        if hit.cause in LASTING:
            return False
        if self.ready > hit.number or self.outlived(hit):
            return True
        if hit.fatal:
            return False
        if self.computed > hit.number and (not self.ended or hit.cause.startswith("hang_")):
            return True
        if self.answered > hit.number:
            return True
        reached = STAGE_ORDER.index(hit.stage) if hit.stage in STAGE_ORDER else -1
        return any(line > hit.number and place > reached for line, place in self.advances)

    def outlived(self, hit: Hit) -> bool:
        """Whether the engine worked on for so long after ``hit`` that it did not end it, however it ended later."""
        return self.lives - hit.lives >= GOES_ON and hit.cause not in LASTING

    def asked_for(self, hit: Hit) -> bool:
        """Whether ``hit`` says only that something ended, after the engine was told to stop."""
        return 0 < self.stopping < hit.number and hit.cause == "unknown"

    def _mark(self, number: int, line: Line) -> None:
        for event in self.parser.read(line, 0.0):
            if isinstance(event, Reading):
                worst = min if event.name.startswith("free") or event.name == "baseline_free" else max
                self.numbers[event.name] = worst(event.value, self.numbers.get(event.name, event.value))
            elif isinstance(event, StageBegun | StageEnded) and event.stage != Stage.IMPORTS:
                stage = self.parser.span_of(line.writer) or Stage(self.parser.stage).catalogue
                self._reach(number, stage, line.text)

    def _foreign(self, number: int, text: str) -> bool:
        """Stage lines of other engines, and of logs that lack sglang's."""
        for stage, pattern in catalogue().marks:
            if not pattern.search(text):
                continue
            if stage == "jit_build":
                self.compiling = True
                return False
            if self.floor is None or STAGE_ORDER.index(stage) > STAGE_ORDER.index(self.floor):
                self._reach(number, stage, text)
            size, available = _CAPTURE_SIZE.search(text), _AVAILABLE.search(text)
            if size:
                self.numbers["capture_size"] = float(size[1])
            if available:
                self.numbers["free_in_capture"] = float(available[1]) * _GIB
            return "rror" not in text and "WARN" not in text
        if catalogue().subject["ready"].search(text[:200]):
            self.ready, self.ready_text = number, text
        return False

    def _reach(self, number: int, stage: str, text: str) -> None:
        self.latest = stage
        self.advances.append((number, STAGE_ORDER.index(stage)))
        if stage == "serving":
            self.ready, self.ready_text, self.floor = number, text, stage


def begins_run(text: str) -> bool:
    """Whether a line is the configuration that sglang prints once per run."""
    return text.startswith("server_args=") and is_configuration(text)


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


def stage_of_frames(frames: str) -> str | None:
    """The stage in which a traceback with these frames was raised, None when they do not say."""
    if not frames:
        return None
    return next((stage for stage, pattern in catalogue().frames if pattern.search(frames)), None)
