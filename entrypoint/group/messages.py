"""The messages between the nodes of a group: JSON over `POST /group` of the head's control port."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from pydantic import TypeAdapter

from ..plan import Plan
from ..supervisor.node import Refusal

# Seconds, where there is nothing to count from: JSON knows no infinity.
NEVER = 1e9

# State of a worker. ``waiting``: prepared, nothing of an older engine left, ready for the next epoch.
WorkerState = Literal["preparing", "waiting", "running", "ended", "leaving", "gave_up"]
# ``wait``: go on as you are; ``start``: spawn for this epoch; ``run``: the epoch is on; ``end``: it is over, end your
# engine; ``over``: the group has given up.
Order = Literal["wait", "start", "run", "end", "over"]


@dataclass(frozen=True)
class End:
    """How the engine of one node ended. ``age``: seconds since its first sign, by the node's own clock, so that hosts
    need not agree on the time; ``own``: False when it only followed the group; ``observed``: fields of
    `healing.classify.Observed`; ``lines``: the last lines of its log, scrubbed."""

    age: float
    own: bool
    observed: Mapping[str, Any]
    lines: tuple[str, ...] = ()
    exit_code: int | None = None
    alarm: str | None = None
    stages: Mapping[str, float] = field(default_factory=dict)
    readings: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerGpu:
    """A GPU of a worker, as the head's plan needs it. Sizes in bytes."""

    index: int
    name: str
    sm: int
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Report:
    """What a worker reports. ``instance_id``: unique to its supervisor; ``identity``: what must be alike on all
    nodes; ``idle_seconds``: since its engine showed progress; ``end`` is there when ``state`` is ended, ``refusal``
    when it is gave_up."""

    rank: int
    instance_id: str
    host: str
    state: WorkerState
    epoch: str | None = None
    identity: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[WorkerGpu, ...] = ()
    idle_seconds: float = 0.0
    end: End | None = None
    refusal: Refusal | None = None


@dataclass(frozen=True)
class Outcome:
    """What follows from the end of an epoch. ``node``: where the first failure was; ``repair``: files to fetch again
    there (empty: what a full check finds; None: nothing)."""

    cause: str
    reason: str
    next_step: str
    exit_code: int
    retry: bool
    node: int = 0
    repair: tuple[str, ...] | None = None
    clear_jit_cache: bool = False
    wait_for_memory: bool = False


@dataclass(frozen=True)
class Reply:
    """The head's reply. ``epoch``: the one that ``order`` is about; ``ready``: the group serves; ``idle_seconds``:
    since any node showed progress; ``plan`` comes with start, ``outcome`` when a reported end was understood,
    ``refusal`` with over."""

    order: Order
    epoch: str | None = None
    ready: bool = False
    idle_seconds: float = 0.0
    message: str = ""
    plan: Plan | None = None
    outcome: Outcome | None = None
    refusal: Refusal | None = None


# Made when first asked for: the one host that needs nobody never pays for them.
@cache
def _report_adapter() -> TypeAdapter[Report]:
    return TypeAdapter(Report)


@cache
def _reply_adapter() -> TypeAdapter[Reply]:
    return TypeAdapter(Reply)


def dump_report(report: Report) -> bytes:
    """Return the body of `POST /group`."""
    return _report_adapter().dump_json(report)


def dump_reply(answer: Reply) -> bytes:
    """Return the body of the response."""
    return _reply_adapter().dump_json(answer)


def parse_report(body: bytes) -> Report:
    """Return the report in ``body``. Raises ValueError for anything else."""
    return _report_adapter().validate_json(body)


def parse_reply(body: bytes) -> Reply:
    """Return the reply in ``body``. Raises ValueError for anything else."""
    return _reply_adapter().validate_json(body)
