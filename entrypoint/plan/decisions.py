"""Pieces that the CPU plan and the GPU plan share: decisions, and parts of the plan document."""

from __future__ import annotations

from typing import Any

from ..checkpoint.model import Checkpoint
from ..config.settings import PREFIX
from .constraints import Constraints
from .infeasibility import Problem
from .plan import Decision


class Choices:
    """Collects one decision per setting: the fixed value when there is one, else the computed one."""

    def __init__(self, constraints: Constraints) -> None:
        self.constraints = constraints
        self._made: dict[str, Decision] = {}

    def take(self, name: str, computed: Any, reason: str, *, source: str = "computed") -> Any:
        """Decide ``name`` and return its value."""
        self._made[name] = self.constraints.fixed.get(name) or Decision(name, computed, source, reason)
        return self._made[name].value

    def note(self, name: str, value: Any, reason: str, *, source: str = "computed") -> None:
        """A decision that no setting can override (a flag of the plan's own)."""
        self._made[name] = Decision(name, value, source, reason)

    def explain(self, name: str, reason: str) -> None:
        """Say more about a value that was fixed or computed."""
        made = self._made[name]
        self._made[name] = Decision(name, made.value, made.source, f"{made.reason}; {reason}")

    def value(self, name: str) -> Any:
        return self._made[name].value

    def decisions(self) -> tuple[Decision, ...]:
        """In the order in which they were made; what ENGINE_ARGS and healing added stands last and wins."""
        made = dict(self._made)
        for decision in self.constraints.extra:
            made[decision.setting] = decision
        return tuple(made.values())


def model_document(checkpoint: Checkpoint, quantization: str) -> dict[str, Any]:
    return {
        "id": checkpoint.model,
        "revision": checkpoint.revision,
        "architecture": checkpoint.architecture,
        "quantization": quantization or None,
        "bytes": checkpoint.bytes,
        "tensors": checkpoint.tensors,
    }


def parallel_document(choices: Choices, constraints: Constraints) -> dict[str, int]:
    return {
        **{name: int(choices.value(name)) for name in ("tp", "pp", "ep", "dp_attention")},
        "nnodes": constraints.settings.nnodes,
    }


def refusal_for_context(constraints: Constraints, context: int, derived: int) -> Problem | None:
    """sglang refuses a context longer than the model's unless SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN is set."""
    if context <= derived or constraints.seen("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN") in ("1", "true"):
        return None
    return Problem(
        f"{PREFIX}CONTEXT_LENGTH={context} is longer than the model's own {derived}",
        ({"context_length": derived}, {"context_length": None}),
    )
