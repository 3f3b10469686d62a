"""What the control port shows. Written by the supervisor's loop alone, read by the handlers on the same loop."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from .serving import Serving

_STARTING = frozenset({"STARTING", "PROBING"})
_ENDING = frozenset({"DRAINING", "STOPPED", "GAVE_UP"})


@dataclass
class Progress:
    """Counts of the start-up under way; None where nothing is known yet."""

    bytes: int | None = None
    bytes_total: int | None = None
    shards: int | None = None
    shards_total: int | None = None
    graphs: int | None = None
    graphs_total: int | None = None

    def document(self) -> dict[str, int | None]:
        """Return the counts as the control port shows them."""
        return dict(vars(self))

    def fraction(self) -> float | None:
        """How far the counted work of the present stage is, 0 to 1."""
        for done, total in (
            (self.graphs, self.graphs_total),
            (self.shards, self.shards_total),
            (self.bytes, self.bytes_total),
        ):
            if done is not None and total:
                return min(1.0, done / total)
        return None


@dataclass
class Status:
    """``healthy``: what the watch of a serving engine last found. ``doomed``: a process that it cannot live without is
    gone. ``started``: READY was reached once."""

    phase: str = "PREPARING"
    stage: str | None = None
    healthy: bool = True
    doomed: str | None = None
    started: bool = False
    reason: str | None = None
    next_step: str | None = None
    progress: Progress = field(default_factory=Progress)
    began: float = field(default_factory=time.monotonic)
    phase_since: float = field(default_factory=time.monotonic)
    boot_began: float | None = None
    typical_seconds: float | None = None
    plan: dict[str, Any] | None = None
    stages: dict[str, float] = field(default_factory=dict)
    readings: dict[str, dict[int | None, float]] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    canary_failures: int = 0
    canary_runs: int = 0
    hang_checks: int = 0
    weights_verified: bool = False
    standby: Literal["none", "preparing", "ready"] = "none"
    serving: Serving = field(default_factory=Serving)

    @property
    def ready(self) -> bool:
        """The engine answers and the last canary was sane."""
        return self.phase == "READY" and self.healthy and self.doomed is None

    def age(self) -> float:
        """Seconds in the present phase."""
        return time.monotonic() - self.phase_since

    def new_boot(self) -> None:
        """An engine was spawned: what the last one measured is no longer true."""
        self.boot_began = time.monotonic()
        self.stages, self.readings = {}, {}
        self.serving.new_engine()

    def readyz(self) -> dict[str, Any]:
        """Return the document of `/readyz`."""
        reason = self.doomed or self.reason
        if not self.ready and reason is None:
            reason = f"{self.phase}{f' ({self.stage})' if self.stage else ''}"
        if not self.ready and self.next_step:
            reason = f"{reason}; {self.next_step}"
        return {"ready": self.ready, "phase": self.phase, "reason": None if self.ready else reason}

    def startupz(self) -> dict[str, Any]:
        """Return the document of `/startupz`."""
        return {
            "phase": self.phase,
            "stage": self.stage,
            "progress": self.progress.document(),
            "percent": self._percent(),
            "elapsed_seconds": round(time.monotonic() - self.began, 3),
            "estimate_seconds": self._estimate(),
        }

    def _estimate(self) -> float | None:
        """Seconds that are left, from the median of earlier boots of the same fingerprint; None when there were
        none, and when this one already takes longer."""
        if self.ready:
            return 0.0
        if self.typical_seconds is None or self.phase in _ENDING:
            return None
        left = self.typical_seconds - self._boot_age()
        return round(left, 1) if left > 0 else None

    def _boot_age(self) -> float:
        """Seconds since the spawn of the engine that is starting; 0 while there is none."""
        if self.boot_began is None or self.phase not in _STARTING:
            return 0.0
        return time.monotonic() - self.boot_began

    def _percent(self) -> float | None:
        if self.ready:
            return 100.0
        if self.phase not in _STARTING and self.phase != "PREPARING":
            return None
        if self.typical_seconds and self.phase in _STARTING:
            return round(min(99.0, 100.0 * self._boot_age() / self.typical_seconds), 1)
        fraction = self.progress.fraction()
        return None if fraction is None else round(100.0 * fraction, 1)
