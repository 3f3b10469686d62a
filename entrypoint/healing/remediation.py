"""The records of the playbook: what is to be done after an end, and what was done after earlier ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from ..plan import Change
from .classify import Verdict
from .engine_config import EngineConfigView

WINDOW = 3600.0  # seconds: unchanged restarts further apart than this are no series


@dataclass(frozen=True)
class Attempt:
    """One end that was healed: its cause and stage, what was changed then, and when (any clock, seconds)."""

    cause: str
    stage: str | None
    changes: tuple[Change, ...]
    at: float


@dataclass(frozen=True)
class Remediation:
    """What is done after an end.

    ``action``: the catalogue's name for what is done; ``wait_for``: what must pass before the next start;
    ``repair``: checkpoint files to fetch again (empty with action repair_weights: whatever a full check finds);
    ``restart``: False when the server is left alone or given up.
    """

    action: str
    changes: tuple[Change, ...] = ()
    give_up: bool = False
    reason: str = ""
    next_step: str = ""
    wait_for: Literal["gpu_memory", "backoff", "none"] = "none"
    repair: tuple[str, ...] = ()
    clear_jit_cache: bool = False
    restart: bool = True


@dataclass(frozen=True)
class RemediationContext:
    """The input of one decision, with the questions about the past that several remedies ask."""

    verdict: Verdict
    config: EngineConfigView
    history: tuple[Attempt, ...]

    def count(self, *causes: str) -> int:
        """How often these causes (default: this one) were answered before, in this series."""
        wanted = causes or (self.verdict.cause,)
        latest = max((attempt.at for attempt in self.history), default=0.0)
        return sum(a.cause in wanted and a.at > latest - WINDOW for a in self.history)

    def repeats(self) -> int:
        """How often the same cause in the same stage was answered before, in this series."""
        latest = max((attempt.at for attempt in self.history), default=0.0)
        same = (self.verdict.cause, self.verdict.stage)
        return sum((a.cause, a.stage) == same and a.at > latest - WINDOW for a in self.history)

    def changed(self, setting: str, *causes: str) -> int:
        """How often ``setting`` was changed, for these causes or for any."""
        return sum(
            change.setting == setting
            for attempt in self.history
            if not causes or attempt.cause in causes
            for change in attempt.changes
        )

    def tried(self, setting: str, now: Any) -> set[Any]:
        """Every value that ``setting`` has had, ``now`` included."""
        past = (c for attempt in self.history for c in attempt.changes if c.setting == setting)
        return {value for change in past for value in (change.before, change.after)} | {now}

    def values_at(self, setting: str, now: Any, causes: Iterable[str]) -> list[Any]:
        """The values that ``setting`` had when one of ``causes`` struck, read backwards from its value ``now``."""
        found, value, wanted = [], now, set(causes)
        for attempt in reversed(self.history):
            for change in attempt.changes:
                if change.setting == setting:
                    value = change.before
            if attempt.cause in wanted:
                found.append(value)
        return found

    def number(self, name: str) -> float | None:
        """A number that the log gave; see `numbers.py`."""
        return self.verdict.numbers.get(name)

    def text(self) -> str:
        """The evidence lines."""
        return "\n".join(item.text for item in self.verdict.evidence)

    def change(self, setting: str, after: Any, reason: str, before: Any = None) -> Change:
        """A change of ``setting``; says so when the value was the operator's own."""
        if before is None:
            before = getattr(self.config, setting, None)
        if setting in self.config.user_set:
            reason += "; this overrides the value that was set by hand, since nothing else can help"
        return Change(setting, before, after, reason)
