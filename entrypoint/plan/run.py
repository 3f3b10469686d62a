"""What one planner run works on: its inputs, its decisions so far, and the parts of a plan that all devices share."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ..checkpoint.model import Checkpoint
from ..config.schema import PREFIX
from ..host.inventory import Inventory
from ..units import MIB, format_bytes
from .command_line import CommandLine
from .constraints import Constraints
from .decision_log import DecisionLog
from .goal import GOALS, Goal
from .model_facts import ENCODERS, derived_context, is_embedding
from .plan import Infeasibility, Learned, Plan

# An idle process of a standby holds 870 to 890 MiB (docs/measured.md).
STANDBY_PROCESS_BYTES = 890 * MIB
LAYOUT = ("tp", "pp", "ep", "dp_attention")


@dataclass
class PlannerRun:
    """One run of the planner. ``derived``: tokens of context that the model's config allows; ``embedding``: the engine
    serves vectors; ``encoder``: every token of a prompt attends to all others, so prompts are neither cut nor cached.
    ``reasons`` and ``warnings`` grow while the run goes on; ``host``: memory of one node and what
    is pinned of it."""

    constraints: Constraints
    inventory: Inventory
    checkpoint: Checkpoint
    learned: Learned | None
    log: DecisionLog = field(init=False)
    derived: int = field(init=False)
    embedding: bool = field(init=False)
    encoder: bool = field(init=False)
    command: CommandLine = field(init=False, default_factory=CommandLine)
    reasons: list[Infeasibility] = field(init=False, default_factory=list)
    warnings: list[str] = field(init=False)
    host: dict[str, Any] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.log = DecisionLog(self.constraints)
        self.derived = derived_context(self.checkpoint.config)
        self.embedding = is_embedding(self.checkpoint, self.constraints.engine_arg("is_embedding"))
        self.encoder = self.checkpoint.architecture in ENCODERS
        self.warnings = list(self.constraints.notes)
        if self.embedding:
            self.command.set("--is-embedding")

    @property
    def goal(self) -> Goal:
        """What the plan is made for."""
        return GOALS[self.constraints.settings.goal]

    def refuse(self, *problems: Infeasibility | None) -> None:
        """Add those of ``problems`` that are any."""
        self.reasons += [problem for problem in problems if problem]

    def context_problem(self, context: int) -> Infeasibility | None:
        """sglang refuses a context longer than the model's own unless SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN is
        set (configs/model_config.py)."""
        allowed = self.constraints.engine_env("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN") in ("1", "true")
        if context <= self.derived or allowed:
            return None
        return Infeasibility(
            f"{PREFIX}CONTEXT_LENGTH={context} is longer than the model's own {self.derived}",
            ({"context_length": self.derived}, {"context_length": None}),
        )

    def finish_command(self) -> None:
        """The flags that every engine of ours gets, then what ENGINE_ARGS and healing put over the plan's own."""
        self.command.set("--enable-metrics")
        effort = self.constraints.settings.reasoning_effort
        if effort:
            self.command.set("--default-chat-template-kwargs", json.dumps({"reasoning_effort": effort}))
        if not self.embedding:
            # Clients and dashboards see how much of a prompt was cached (usage.prompt_tokens_details).
            self.command.set("--enable-cache-report")
        # The supervisor asks every few seconds; the engine's access log is for clients.
        self.command.set("--uvicorn-access-log-exclude-prefixes", "/metrics")
        self.log.record("--enable-metrics", True, "the supervisor reads token progress from /metrics")
        self.command.merge(self.constraints.flags, self.constraints.given)

    def plan(self, quantization: str, values: dict[str, Any]) -> Plan:
        """The plan document's object. ``values``: the fields of `Plan` that the device decides."""
        checkpoint, log = self.checkpoint, self.log
        if self.constraints.settings.standby == "on":
            self._add_standby(int(log.value("tp")) * int(log.value("pp")))
        return Plan(
            feasible=not self.reasons,
            reasons=tuple(problem.text for problem in self.reasons),
            model={
                "id": checkpoint.model,
                "revision": checkpoint.revision,
                "architecture": checkpoint.architecture,
                "quantization": quantization or None,
                "bytes": checkpoint.bytes,
                "tensors": checkpoint.tensors,
            },
            parallel={
                **{name: int(log.value(name)) for name in LAYOUT},
                "nnodes": self.constraints.settings.nnodes,
            },
            is_embedding=self.embedding,
            goal=self.goal.name,
            host=self.host,
            flags=self.command.arguments(),
            decisions=log.decisions(),
            warnings=tuple(dict.fromkeys(self.warnings)),
            **{"env": dict(self.constraints.env), **values},
        )

    def _add_standby(self, ranks: int) -> None:
        """Account for a standby: main, detokenizer and one process for each rank of this node."""
        count = ranks // self.constraints.settings.nnodes + 2
        need, memory = count * STANDBY_PROCESS_BYTES, self.inventory.host_memory_bytes
        self.host = {"memory_bytes": memory or None, **(self.host or {}), "standby_bytes": need}
        if 0 < memory < 2 * need:
            self.warnings.append(
                f"{PREFIX}STANDBY=on: its {count} processes hold {format_bytes(need)} of host memory, of which there "
                f"are {format_bytes(memory)}; none is prepared while less than twice that is free"
            )
