"""One run of the engine as the supervisor sees it: the tree, its log as events, what it has measured."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ..host.kernel_log import KernelMonitor
from ..scrub import Scrubber
from . import log
from .process import Ended, Engine

# A crash of eight ranks writes some 2,000 lines; a line of arguments has 5,000 characters.
KEEP_LINES = 4000
KEEP_CHARS = 8192


@dataclass
class Run:
    """What one engine has printed and done so far. Filled by the event loop alone.

    ``lines``: the last lines, scrubbed. ``stages``: seconds by stage, of the slowest rank. ``readings``: by name, then
    by rank. ``began``: monotonic seconds of the spawn.
    """

    number: int
    engine: Engine
    scrub: Scrubber
    ranks: int  # tensor-parallel ranks of the plan, over all nodes
    most_bytes: float  # of one GPU: no reading can be larger
    on_line: Callable[[str], None]
    on_event: Callable[[log.Event], None]
    on_end: Callable[[Ended], None]
    on_gone: Callable[[], None] = lambda: None
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEEP_LINES))
    stages: dict[str, float] = field(default_factory=dict)
    readings: dict[str, dict[int | None, float]] = field(default_factory=dict)
    progress: dict[str, tuple[int, int]] = field(default_factory=dict)
    ends: list[Ended] = field(default_factory=list)
    heard: int = 0  # lines so far; `lines` keeps the last ones only
    stage: str = "imports"
    kernel_evidence: KernelMonitor = field(default_factory=KernelMonitor)
    began: float = field(default_factory=time.monotonic)
    active: float = field(default_factory=time.monotonic)  # when its start-up last showed progress
    exposed: bool = False  # its HTTP server listens: from here on the log may hold what clients wrote
    exposed_from: int = 0  # `heard` at that time
    healthy_until: int = 0  # `heard` when a request was sent whose answer proved the engine healthy
    gpu_free_bytes: int | None = None  # least free memory of a GPU at the last look while it served
    failure_started_at: float | None = None  # monotonic seconds of the first evidence that it is ending

    def __post_init__(self) -> None:
        self._parser = log.LogParser()
        self._stage_began = self.began

    async def follow(self) -> None:
        """Read output and ends until main has ended."""
        await self.engine.follow(self._line, self._end, self.on_gone)

    @property
    def exit_code(self) -> int | None:
        """The exit code of main (negative: the signal), None while it runs."""
        return next((end.code for end in self.ends if end.role == "main"), None)

    def _line(self, text: str) -> None:
        plain = log.strip_ansi(text) if "\x1b" in text else text
        clean = self.scrub(plain)
        if clean == plain and plain is not text:
            clean = self.scrub(text)  # colours stay where none hides inside a secret
        text = clean
        self.heard += 1
        self.lines.append(text[:KEEP_CHARS])
        self.on_line(text)
        now = time.monotonic()
        for event in self._parser.feed(text, now):
            match event:
                case log.Reading() if not self.exposed and self._is_credible(event):
                    self.readings.setdefault(event.name, {})[event.rank] = event.value
                case log.Reading():
                    continue
                case log.Progress(kind, done, total):
                    self.progress[kind] = (done, total)
            self.on_event(event)
        if not self.exposed and (self._parser.fired_up or "Application startup complete" in text[:200]):
            self.exposed, self.exposed_from = True, self.heard
        self._advance(self._parser.stage, now)

    def _advance(self, stage: str, now: float) -> None:
        if stage != self.stage:
            self.stages[self.stage] = self.stages.get(self.stage, 0.0) + now - self._stage_began
            self.stage, self._stage_began = stage, now

    def _end(self, ended: Ended) -> None:
        self.ends.append(ended)
        self.on_end(ended)

    def _is_credible(self, reading: log.Reading) -> bool:
        """Whether a rank that exists has read what it can have read."""
        limit = math.inf if reading.name in log.COUNTS else self.most_bytes
        return 0 <= reading.value <= limit and (reading.rank is None or reading.rank < self.ranks)

    def prove_healthy(self, heard: int) -> None:
        """Note that the engine computed an answer to what it was asked when it had written ``heard`` lines: whatever
        those say, it was not the end of it."""
        self.healthy_until = max(self.healthy_until, heard)

    def survived(self) -> tuple[int, int]:
        """Return the first and the last line of ``lines``, counted from 1, that clients may have written and that the
        engine outlived; (0, 0) when there are none."""
        gone = self.heard - len(self.lines)
        first, last = max(1, self.exposed_from + 1 - gone), self.healthy_until - gone
        return (first, last) if self.exposed and last >= first else (0, 0)

    def mark_failing(self) -> None:
        """Note the time of a sign that the run ends; the first one counts."""
        if self.failure_started_at is None:
            self.failure_started_at = time.monotonic()

    def stage_seconds(self) -> dict[str, float]:
        """Return seconds by stage, the one under way included."""
        current = self.stages.get(self.stage, 0.0) + time.monotonic() - self._stage_began
        return {**self.stages, self.stage: current}

    def worst(self, name: str) -> float | None:
        """Return the reading of the rank that has least (free memory) or, for sizes, most; None when there is none."""
        values = self.readings.get(name)
        if not values:
            return None
        least = name.startswith(("free", "baseline", "available", "kv", "max_total"))
        return min(values.values()) if least else max(values.values())
