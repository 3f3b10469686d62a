"""One decision per setting: the pinned value where there is one, else what the planner computed, and why."""

from __future__ import annotations

from typing import Any

from .constraints import Constraints
from .plan import Decision


class DecisionLog:
    """Collects the decisions of one planner run, in the order in which they are made."""

    def __init__(self, constraints: Constraints) -> None:
        self._constraints = constraints
        self._made: dict[str, Decision] = {}

    def decide(self, name: str, computed: Any, reason: str, *, source: str = "computed") -> Any:
        """Decide the setting ``name`` and return its value: the pinned one, else ``computed``."""
        self._made[name] = self._constraints.pinned.get(name) or Decision(name, computed, source, reason)
        return self._made[name].value

    def record(self, name: str, value: Any, reason: str, *, source: str = "computed") -> None:
        """Record what no setting can override: a flag of the plan's own, or where numbers came from."""
        self._made[name] = Decision(name, value, source, reason)

    def append_reason(self, name: str, reason: str) -> None:
        """Say more about a decision that was made."""
        made = self._made[name]
        self._made[name] = Decision(name, made.value, made.source, f"{made.reason}; {reason}")

    def value(self, name: str) -> Any:
        """The value that was decided for ``name``. Raises KeyError before the decision."""
        return self._made[name].value

    def decisions(self) -> tuple[Decision, ...]:
        """In the order in which they were made; what ENGINE_ARGS and healing added stands last and wins."""
        made = dict(self._made)
        for decision in self._constraints.extra:
            made[decision.setting] = decision
        return tuple(made.values())
