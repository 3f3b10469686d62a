"""The engine's log as events: stages, readings, progress. Pure: no clock, no I/O.

The caller splits the stream at ``\\n`` and ``\\r`` (tqdm rewrites its line with ``\\r``). Texts are those of
sglang 0.5.23 (``distributed/bootstrap.py``, ``model_executor/model_runner.py``, ``model_runner_components/``,
``mem_cache/kv_cache_configurator.py``, ``managers/scheduler.py``, ``entrypoints/``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from ..units import GIB
from .lines import EvidenceFilter, Line, strip_ansi, unwrap

__all__ = [
    "COUNTS",
    "Event",
    "FiredUp",
    "LogParser",
    "Progress",
    "Reading",
    "Stage",
    "StageBegun",
    "StageEnded",
    "mark_of",
    "strip_ansi",
]


class Stage(StrEnum):
    """A span of the engine's start, in order.

    `autotune` is all that happens between the pool and the graphs; `warmup` begins when the scheduler is complete:
    what follows is the first forward pass.
    """

    IMPORTS = "imports"
    DISTRIBUTED = "distributed"
    LOADING = "loading"
    KV_POOL = "kv_pool"
    AUTOTUNE = "autotune"
    GRAPHS = "graphs"
    WARMUP = "warmup"
    SERVING = "serving"

    @property
    def catalogue(self) -> str:
        """The failure catalogue's name of the same span."""
        return _CATALOGUE[self]


_CATALOGUE = {
    Stage.IMPORTS: "init",
    Stage.DISTRIBUTED: "nccl_init",
    Stage.LOADING: "weight_load",
    Stage.KV_POOL: "kv_alloc",
    Stage.AUTOTUNE: "warmup",
    Stage.GRAPHS: "graph_capture",
    Stage.WARMUP: "first_forward",
    Stage.SERVING: "serving",
}
_ORDER = tuple(Stage)


@dataclass(frozen=True)
class StageBegun:
    """``at`` is the caller's clock, seconds."""

    stage: str
    rank: int | None
    at: float


@dataclass(frozen=True)
class StageEnded:
    """``elapsed`` in seconds: the engine's own figure where it prints one, else ours."""

    stage: str
    rank: int | None
    elapsed: float
    at: float


@dataclass(frozen=True)
class Reading:
    """A number that the engine printed: bytes, or a count for kv_tokens, max_total_num_tokens,
    max_running_requests, context_length and chunked_prefill_size. graph_bytes is the rank's sum so far."""

    name: str
    value: float
    rank: int | None


# Readings that count tokens or requests; all others are bytes.
COUNTS = frozenset(
    {"kv_tokens", "max_total_num_tokens", "max_running_requests", "context_length", "chunked_prefill_size"}
)


@dataclass(frozen=True)
class Progress:
    kind: Literal["shards", "graphs", "kernels"]
    done: int
    total: int


@dataclass(frozen=True)
class FiredUp:
    """sglang says that it is ready. Not proof: it also says so when another server holds its port."""


Event = StageBegun | StageEnded | Reading | Progress | FiredUp

_NUMBER = r"(\d+(?:\.\d+)?)"
# What a line does to the stage of the rank that wrote it: (text, begin or end, stage).
_MARKS = (
    ("Init parallel begin", "begin", "distributed"),
    ("Init parallel ends", "end", "distributed"),
    ("Load weight begin", "begin", "loading"),
    ("Load weight end", "end", "loading"),
    ("KV Cache is allocated", "begin", "kv_pool"),
    ("Memory pool end", "end", "kv_pool"),
    ("Running FlashInfer autotune", "begin", "autotune"),
    ("FlashInfer autotune completed", "end", "autotune"),
    ("max_total_num_tokens=", "begin", "warmup"),
    ("Engine startup timings", "begin", "warmup"),
    ("Application startup complete", "begin", "warmup"),
    ("The server is fired up and ready to roll", "begin", "serving"),
)
_CAPTURE = re.compile(r"Capture .{0,60}?(?:graph|draft extend) (begin|end)\b", re.IGNORECASE)
# A stage that ends hands over to the next one at once: nothing is said while the pool is sized, for example.
_AFTER = {"loading": "kv_pool", "kv_pool": "autotune"}
# Marks of the main process: it only goes on when every scheduler is ready.
_OF_ALL = (
    "Engine startup timings",
    "Application startup complete",
    "The server is fired up and ready to roll",
)

_ELAPSED = re.compile(rf"elapsed={_NUMBER} ?s")
_AVAILABLE = re.compile(rf"avail mem={_NUMBER} ?GB")
_USED = re.compile(rf"mem usage={_NUMBER} ?GB")
_KV_TOKENS = re.compile(r"#tokens: (\d+)")
_KV_SIZE = re.compile(rf"\b(?:KV|K|V) size: {_NUMBER} ?GB")
_SUMMARY = re.compile(rf"\b(\w+)={_NUMBER}(?: (GB))?")
_SUMMARY_NAMES = {
    "max_total_num_tokens": "max_total_num_tokens",
    "max_running_requests": "max_running_requests",
    "context_len": "context_length",
    "chunked_prefill_size": "chunked_prefill_size",
    "available_gpu_mem": "available_gpu_mem",
    "available_cpu_mem": "available_cpu_mem",
}
_BAR = re.compile(r"^(?P<what>[^%|]{3,120}?):?\s+\d{1,3}%.*?\|\s*(?P<done>\d+)/(?P<total>\d+)\b")
_BAR_KINDS: tuple[tuple[str, Literal["shards", "graphs", "kernels"]], ...] = (
    ("shards", "shards"),
    ("safetensors", "shards"),
    ("Capturing", "graphs"),
    ("Compiling num tokens", "graphs"),
    ("DeepGEMM", "kernels"),
    ("Warmup", "kernels"),
    ("[Autotuner]", "kernels"),
)
_GLUED = re.compile(r"(?<=.)(?=\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[\] .])")


def mark_of(text: str) -> tuple[str, str] | None:
    """(begin or end, stage) when ``text`` is one of the engine's stage lines."""
    head = text[:80]  # the texts are also quoted in messages, further to the right
    for mark, kind, stage in _MARKS:
        if mark in head and (mark[-1] != "=" or text.startswith(mark)):
            return kind, stage
    capture = _CAPTURE.match(text)
    return (capture[1].lower(), "graphs") if capture else None


class LogParser:
    """Feeds on lines, remembers each rank's stage.

    ``stage`` is the stage of the whole start-up: that of the least advanced rank that has said anything: the
    others wait for it in the next collective. Before any stage line it is ``imports``.
    """

    def __init__(self) -> None:
        self.fired_up = False
        self._stages: dict[str, str] = {}
        self._began: dict[tuple[str, str], float] = {}
        self._sums: dict[tuple[str, str], float] = {}
        self._floor = "imports"
        self._started = False
        self._filter = EvidenceFilter()

    @property
    def stage(self) -> str:
        if self.fired_up:
            return "serving"
        slowest = min(self._stages.values(), key=_ORDER.index, default="imports")
        return max(slowest, self._floor, key=_ORDER.index)

    def writers(self) -> tuple[str, ...]:
        """Everybody who has written a stage line."""
        return tuple(self._stages)

    def span_of(self, writer: str) -> str | None:
        """The catalogue's stage of one writer (``Line.writer``), None for one never heard of. A capture that has
        ended is followed by warm-up work, as far as a failure is concerned."""
        if self.fired_up:
            return Stage.SERVING.catalogue
        stage = self._stages.get(writer)
        if stage is not None and _ORDER.index(stage) < _ORDER.index(self._floor):
            stage = self._floor
        if stage == "graphs" and (writer, stage) not in self._began:
            return Stage.AUTOTUNE.catalogue
        return Stage(stage).catalogue if stage else None

    def feed(self, line: str, now: float) -> list[Event]:
        """The events of one line, without its line end. ``now``: any monotonic clock, seconds."""
        events: list[Event] = []
        if not self._started:
            self._started = True
            events.append(StageBegun("imports", None, now))
            self._began["", "imports"] = now
        for part in _GLUED.split(line[:65536]) if "%|" in line else (line,):
            found = unwrap(part)
            if found.text and self._filter.admits(found):
                events.extend(self.read(found, now))
        return events

    def read(self, line: Line, now: float) -> list[Event]:
        """The events of a line that is unwrapped, and known to be the engine's own."""
        return list(self._events(line, now))

    def _events(self, line: Line, now: float) -> Iterator[Event]:
        text = line.text
        bar = _BAR.match(text) if "%" in text else None
        if bar:
            kind = next((kind for word, kind in _BAR_KINDS if word in bar["what"]), None)
            if kind:
                yield Progress(kind, int(bar["done"]), int(bar["total"]))
            return
        mark = None if self.fired_up else mark_of(text)  # afterwards only a request's text looks like one
        if mark:
            yield from self._move(line, *mark, now)
            yield from self._readings(line, *mark)

    def _move(self, line: Line, kind: str, stage: str, now: float) -> Iterator[Event]:
        writer = line.writer
        if any(mark in line.text for mark in _OF_ALL):
            self._floor = stage
            writer = next(iter(self._stages), "")
        if kind == "end":
            yield self._end(writer, line.rank, stage, _ELAPSED.search(line.text), now)
            self._stages[writer] = stage
        following = stage if kind == "begin" else _AFTER.get(stage)
        if following and (self._stages.get(writer) != following or stage == "graphs"):
            before = self._stages.get(writer, "imports")
            if kind == "begin" and before == "imports" and ("", "imports") in self._began:
                yield self._end("", line.rank, "imports", None, now)
            if kind == "begin" and before in ("autotune", "warmup") and (writer, before) in self._began:
                yield self._end(writer, line.rank, before, None, now)
            self._stages[writer] = following
            self._began[writer, following] = now
            yield StageBegun(following, line.rank, now)
        if stage == "serving" and not self.fired_up:
            self.fired_up = True
            yield FiredUp()

    def _end(self, writer: str, rank: int | None, stage: str, elapsed: re.Match[str] | None, now: float) -> StageEnded:
        began = self._began.pop((writer, stage), now)
        return StageEnded(stage, rank, float(elapsed[1]) if elapsed else now - began, now)

    def _weight_readings(self, line: Line, kind: str) -> Iterator[Reading]:
        """Yield memory before and after a model is loaded, in bytes. A second model of one writer is the draft."""
        available, used = _AVAILABLE.search(line.text), _USED.search(line.text)
        second = (line.writer, "weights") in self._sums
        if kind == "begin" and available and not second:
            yield Reading("baseline_free", _bytes(available[1]), line.rank)
        if kind == "end" and used:
            self._sums[line.writer, "weights"] = _bytes(used[1])
            yield Reading("draft_weights" if second else "weights", _bytes(used[1]), line.rank)
        if kind == "end" and available:
            yield Reading("free_after_load", _bytes(available[1]), line.rank)

    def _readings(self, line: Line, kind: str, stage: str) -> Iterator[Reading]:
        text, rank = line.text, line.rank
        available, used = _AVAILABLE.search(text), _USED.search(text)
        if stage == "loading":
            yield from self._weight_readings(line, kind)
        elif text.startswith("KV Cache is allocated"):
            yield from _pool_readings(line)
        elif stage == "kv_pool" and kind == "end" and available:
            yield Reading("free_after_pool", _bytes(available[1]), rank)
        elif stage == "graphs" and kind == "end":
            if used:
                total = self._sums.get((line.writer, "graphs"), 0.0) + _bytes(used[1])
                self._sums[line.writer, "graphs"] = total
                yield Reading("graph_bytes", total, rank)
            if available:
                yield Reading("free_after_graphs", _bytes(available[1]), rank)
        elif "max_total_num_tokens=" in text:
            for name, value, unit in _SUMMARY.findall(text):
                if name in _SUMMARY_NAMES:
                    yield Reading(_SUMMARY_NAMES[name], _bytes(value) if unit else float(value), rank)


def _bytes(gigabytes: str) -> float:
    """The engine writes GB and means GiB (``utils/common.py:get_available_gpu_memory``)."""
    return float(gigabytes) * GIB


def _pool_readings(line: Line) -> Iterator[Reading]:
    """Yield tokens and bytes of a KV pool that was allocated."""
    count, sizes = _KV_TOKENS.search(line.text), _KV_SIZE.findall(line.text)
    if count:
        yield Reading("kv_tokens", float(count[1]), line.rank)
    if sizes:
        yield Reading("kv_bytes", sum(_bytes(size) for size in sizes), line.rank)
