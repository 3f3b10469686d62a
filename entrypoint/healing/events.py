"""What the state machine is told (events) and what it answers (actions).

``run`` of an event is the number of the spawn that it is about.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class Prepared:
    """The weights are there and verified."""


@dataclass(frozen=True)
class Planned:
    """A feasible plan exists."""


@dataclass(frozen=True)
class Refused:
    """Preparing, planning or recovering found a reason not to go on."""

    cause: str
    reason: str
    next_step: str
    exit_code: int


@dataclass(frozen=True)
class FiredUp:
    """The engine says that it is up; that is not proof."""

    run: int


@dataclass(frozen=True)
class ProbePassed:
    """The engine answers, and the answer is sane."""

    run: int


@dataclass(frozen=True)
class EngineEnded:
    """The main process ended, or another that the engine cannot live without."""

    run: int


@dataclass(frozen=True)
class Unhealthy:
    """The engine must be ended: it hangs, answers nonsense or stalls in a stage."""

    run: int
    reason: str


@dataclass(frozen=True)
class TreeGone:
    """The kill is over: no process of the engine is left, or none that can be killed."""

    run: int


@dataclass(frozen=True)
class Diagnosed:
    """What the end was, and what the playbook says. ``retry`` False: no restart can help."""

    cause: str
    reason: str
    next_step: str
    exit_code: int
    retry: bool


@dataclass(frozen=True)
class Recovered:
    """Ports free, GPU memory back, repairs done, back-off over."""


@dataclass(frozen=True)
class StopRequested:
    """SIGTERM or SIGINT. A second one hurries."""


@dataclass(frozen=True)
class RestartRequested:
    """The operator wants a fresh engine: drain, restart, no budget spent. ``at_once``: also of one that starts still,
    for another node of the group is being stopped."""

    at_once: bool = False


@dataclass(frozen=True)
class Tick:
    """A deadline may have passed."""


Event = (
    Prepared
    | Planned
    | Refused
    | FiredUp
    | ProbePassed
    | EngineEnded
    | Unhealthy
    | TreeGone
    | Diagnosed
    | Recovered
    | StopRequested
    | RestartRequested
    | Tick
)


class Do(StrEnum):
    """What the driver is to do. The long ones end in an event."""

    PREPARE = "prepare"
    PLAN = "plan"
    SPAWN = "spawn"
    PROBE = "probe"
    RECORD_READY = "record_ready"
    RECORD_STABLE = "record_stable"
    CANCEL = "cancel"  # whatever task runs without an engine
    DRAIN = "drain"  # SIGTERM to main
    KILL = "kill"  # the whole tree, then TreeGone
    DIAGNOSE = "diagnose"
    RECOVER = "recover"  # after `delay` seconds
    EXIT = "exit"


@dataclass(frozen=True)
class Action:
    """One thing to do. ``delay``: seconds to wait before it."""

    do: Do
    delay: float = 0.0
