"""The state machine: one pure function, (state, event, now) -> (state, actions). It knows nothing of sglang.

    PREPARING -> PLANNING -> STARTING -> PROBING -> READY
    STARTING, PROBING, READY -> STOPPING_ENGINE -> RECOVERING -> PLANNING
    SIGTERM/SIGINT anywhere -> DRAINING -> STOPPED;  a hopeless cause -> GAVE_UP

Stop wins from everywhere and is idempotent. Deadlines are asked for (`next_deadline`), never slept for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Phase(StrEnum):
    PREPARING = "PREPARING"
    PLANNING = "PLANNING"
    STARTING = "STARTING"
    PROBING = "PROBING"
    READY = "READY"
    STOPPING_ENGINE = "STOPPING_ENGINE"
    RECOVERING = "RECOVERING"
    DRAINING = "DRAINING"
    STOPPED = "STOPPED"
    GAVE_UP = "GAVE_UP"


# A READY of this many seconds is stable: what led to it may be remembered, and back-off begins anew.
STABLE_AFTER = 30.0
BUDGET_EXIT = 70

RUNNING = frozenset({Phase.STARTING, Phase.PROBING, Phase.READY})
FINAL = frozenset({Phase.STOPPED, Phase.GAVE_UP})


@dataclass(frozen=True)
class Limits:
    """Seconds, and the restart budget. See the settings of the same names."""

    max_restarts: int = 5
    restart_window: float = 3600.0
    backoff_initial: float = 2.0
    backoff_max: float = 300.0
    startup_timeout: float = 3600.0
    drain_timeout: float = 60.0
    drain_grace: float = 2.0
    kill_grace: float = 30.0
    hold_on_give_up: bool = False


# -- events: what happened ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """The weights are there and proven."""


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
    run: int


@dataclass(frozen=True)
class EngineEnded:
    """Main ended, or a process that the engine cannot live without."""

    run: int


@dataclass(frozen=True)
class Unhealthy:
    """The engine must be ended: it hangs, answers nonsense or stalls in a stage."""

    run: int
    reason: str


@dataclass(frozen=True)
class TreeGone:
    """No process of the engine is left. ``stuck``: names of processes that would not die."""

    run: int
    stuck: tuple[str, ...] = ()


@dataclass(frozen=True)
class Diagnosed:
    """What the end was, and what the ladder says. ``retry`` False: no restart can help."""

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


# -- actions: what the driver does --------------------------------------------------------------------------


class Do(StrEnum):
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
    do: Do
    delay: float = 0.0


# -- state --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """``restarts``: times of the automatic restarts still in the window. ``run`` counts spawns, so that a late
    event of an old engine is known as one. ``planned``: the end under way was asked for by the operator."""

    limits: Limits
    phase: Phase = Phase.PREPARING
    since: float = 0.0
    run: int = 0
    deadline: float | None = None
    restarts: tuple[float, ...] = ()
    in_a_row: int = 0
    stopping: bool = False
    planned: bool = False
    draining_sent: bool = False
    cause: str | None = None
    reason: str | None = None
    next_step: str | None = None
    exit_code: int = 0


Result = tuple[State, tuple[Action, ...]]


def start(limits: Limits, now: float) -> Result:
    """The first state and action."""
    return State(limits=limits, since=now), (Action(Do.PREPARE),)


def next_deadline(state: State) -> float | None:
    """When the driver must send a Tick, if nothing else happens before."""
    return state.deadline


def step(state: State, event: Event, now: float) -> Result:
    """Advance. Never raises; an event that does not fit the phase changes nothing."""
    if state.phase in FINAL:
        return _after_the_end(state, event, now)
    if getattr(event, "run", state.run) != state.run:
        return state, ()
    match event:
        case StopRequested():
            return _stop(state, now)
        case RestartRequested():
            return _restart(state, event, now)
        case Tick():
            return _tick(state, now)
        case Refused() if state.phase in (Phase.PREPARING, Phase.PLANNING, Phase.RECOVERING, Phase.STARTING):
            return _give_up(state, event, now)
    match state.phase, event:
        case Phase.PREPARING, Prepared():
            return _enter(state, Phase.PLANNING, now), (Action(Do.PLAN),)
        case Phase.PLANNING, Planned():
            starting = _enter(state, Phase.STARTING, now, wait=state.limits.startup_timeout)
            return replace(starting, run=state.run + 1), (Action(Do.SPAWN),)
        case Phase.STARTING, FiredUp():
            # The start-up deadline goes on: a probe that never passes is a start that never ends.
            return replace(state, phase=Phase.PROBING, since=now), (Action(Do.PROBE),)
        case Phase.PROBING, ProbePassed():
            return _enter(state, Phase.READY, now, wait=STABLE_AFTER), (Action(Do.RECORD_READY),)
        case ((Phase.STARTING | Phase.PROBING | Phase.READY), (EngineEnded() | Unhealthy())):
            stable = state.phase is Phase.READY and now - state.since >= STABLE_AFTER
            return _end_engine(replace(state, in_a_row=0) if stable else state, now)
        case Phase.DRAINING, (EngineEnded() | Unhealthy()):
            return _end_engine(replace(state, draining_sent=True), now, Phase.DRAINING)
        case Phase.STOPPING_ENGINE, EngineEnded() if state.planned:
            return _end_engine(state, now)
        case Phase.DRAINING, TreeGone():
            return _stopped(state, now)
        case Phase.STOPPING_ENGINE, TreeGone() if state.planned:
            after = replace(state, planned=False, in_a_row=0)
            return _enter(after, Phase.RECOVERING, now), (Action(Do.RECOVER),)
        case Phase.STOPPING_ENGINE, TreeGone():
            return _enter(state, Phase.RECOVERING, now), (Action(Do.DIAGNOSE),)
        case Phase.RECOVERING, Diagnosed():
            return _diagnosed(state, event, now)
        case Phase.RECOVERING, Recovered():
            return _enter(state, Phase.PLANNING, now), (Action(Do.PLAN),)
    return state, ()


def _enter(state: State, phase: Phase, now: float, *, wait: float | None = None) -> State:
    return replace(state, phase=phase, since=now, deadline=None if wait is None else now + wait)


def _end_engine(state: State, now: float, phase: Phase = Phase.STOPPING_ENGINE) -> Result:
    return _enter(state, phase, now, wait=state.limits.kill_grace), (Action(Do.KILL),)


def _stop(state: State, now: float) -> Result:
    limits = state.limits
    if state.phase is Phase.DRAINING:
        if state.stopping and state.draining_sent:
            return state, ()  # the kill is under way already
        return _end_engine(replace(state, draining_sent=True), now, Phase.DRAINING)  # hurried
    stopping = replace(state, stopping=True, planned=False, draining_sent=False)
    if state.phase in (Phase.PROBING, Phase.READY) or (state.phase is Phase.STOPPING_ENGINE and state.planned):
        return replace(_enter(stopping, Phase.DRAINING, now, wait=limits.drain_grace), draining_sent=False), ()
    if state.phase in (Phase.STARTING, Phase.STOPPING_ENGINE):
        # Nothing was served yet: SIGTERM to a starting sglang only leaves orphans.
        ended = replace(_enter(stopping, Phase.DRAINING, now, wait=limits.kill_grace), draining_sent=True)
        return ended, (Action(Do.KILL),)
    stopped, actions = _stopped(stopping, now)
    return stopped, (Action(Do.CANCEL), *actions)


def _restart(state: State, event: RestartRequested, now: float) -> Result:
    if state.phase in (Phase.STARTING, Phase.PROBING) and event.at_once:
        return _end_engine(replace(state, planned=True, draining_sent=True), now)
    if state.phase is not Phase.READY:
        return state, ()
    waiting = _enter(state, Phase.STOPPING_ENGINE, now, wait=state.limits.drain_grace)
    return replace(waiting, planned=True, draining_sent=False), ()


def _tick(state: State, now: float) -> Result:
    if state.deadline is None or now < state.deadline:
        return state, ()
    limits = state.limits
    if state.phase is Phase.READY:
        if now - state.since < limits.restart_window:
            rest = replace(state, deadline=state.since + limits.restart_window)
            return rest, (Action(Do.RECORD_STABLE),)
        return replace(state, deadline=None, restarts=(), in_a_row=0), (Action(Do.RECORD_STABLE),)
    if state.phase is Phase.DRAINING or state.planned:
        if not state.draining_sent:
            waited = max(0.0, limits.drain_timeout - limits.drain_grace)
            return replace(state, draining_sent=True, deadline=now + waited), (Action(Do.DRAIN),)
        return _end_engine(state, now, state.phase)
    if state.phase in (Phase.STARTING, Phase.PROBING):
        return _end_engine(state, now)
    if state.phase is Phase.STOPPING_ENGINE:
        return _end_engine(state, now)
    return replace(state, deadline=None), ()


def _diagnosed(state: State, event: Diagnosed, now: float) -> Result:
    named = replace(state, cause=event.cause, reason=event.reason, next_step=event.next_step)
    if not event.retry:
        return _give_up(named, Refused(event.cause, event.reason, event.next_step, event.exit_code), now)
    recent = tuple(at for at in state.restarts if now - at < state.limits.restart_window)
    if len(recent) >= state.limits.max_restarts:
        spent = f"{event.reason}; {len(recent)} restarts within the window did not help"
        return _give_up(named, Refused(event.cause, spent, event.next_step, BUDGET_EXIT), now)
    # The first restart in a row is immediate, the second waits backoff_initial, and so on.
    delay = (
        min(state.limits.backoff_max, state.limits.backoff_initial * 2.0 ** (state.in_a_row - 1))
        if state.in_a_row
        else 0.0
    )
    counted = replace(named, restarts=(*recent, now), in_a_row=state.in_a_row + 1)
    return _enter(counted, Phase.RECOVERING, now), (Action(Do.RECOVER, delay),)


def _give_up(state: State, refused: Refused, now: float) -> Result:
    over = replace(
        _enter(state, Phase.GAVE_UP, now),
        cause=refused.cause,
        reason=refused.reason,
        next_step=refused.next_step,
        exit_code=refused.exit_code,
    )
    actions = () if state.limits.hold_on_give_up else (Action(Do.EXIT),)
    return over, actions


def _stopped(state: State, now: float) -> Result:
    return replace(_enter(state, Phase.STOPPED, now), stopping=True, exit_code=0), (Action(Do.EXIT),)


def _after_the_end(state: State, event: Event, now: float) -> Result:
    if state.phase is Phase.GAVE_UP and isinstance(event, StopRequested) and not state.stopping:
        # Held after giving up: leave with the verdict's code.
        return replace(state, stopping=True), (Action(Do.CANCEL), Action(Do.EXIT))
    return state, ()
