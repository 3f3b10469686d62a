"""The state machine: one pure function, (state, event, now) -> (state, actions). It knows nothing of sglang.

    PREPARING -> PLANNING -> STARTING -> PROBING -> READY
    STARTING, PROBING, READY -> STOPPING_ENGINE -> DIAGNOSING -> RECOVERING -> PLANNING
    a restart that the operator asks for: READY -> RESTART_GRACE -> RESTART_DRAINING -> RESTART_KILLING -> RECOVERING
    SIGTERM or SIGINT anywhere: -> STOP_GRACE -> DRAINING -> STOP_KILLING -> STOPPED
    a hopeless cause -> GAVE_UP

Stop wins from everywhere and is idempotent. Deadlines are asked for (`next_deadline`), never slept for. Times are
seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .events import (
    Action,
    Diagnosed,
    Do,
    EngineEnded,
    Event,
    FiredUp,
    Planned,
    Prepared,
    ProbePassed,
    Recovered,
    Refused,
    RestartRequested,
    StopRequested,
    Tick,
    TreeGone,
    Unhealthy,
)
from .phases import Phase

# A READY of this many seconds is stable: what led to it may be remembered, and back-off begins anew.
STABLE_AFTER = 30.0
# Refusals that time may cure, once an engine has run here.
PASSING = frozenset({"port_in_use"})
# EX_SOFTWARE of sysexits: the restart budget is used up.
BUDGET_EXIT = 70

_UP = frozenset({Phase.STARTING, Phase.PROBING, Phase.READY})
_FINAL = frozenset({Phase.STOPPED, Phase.GAVE_UP})
# Phases in which no process of the engine exists.
_WITHOUT_ENGINE = frozenset({Phase.PREPARING, Phase.PLANNING, Phase.DIAGNOSING, Phase.RECOVERING})


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


# -- state --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """``since``: when the phase began; a drain counts from its grace. ``run`` counts spawns, so that a late event of
    an old engine is known as one. ``restarts``: times of the automatic restarts still in the window. ``in_a_row``:
    automatic restarts since the last stable READY."""

    limits: Limits
    phase: Phase = Phase.PREPARING
    since: float = 0.0
    run: int = 0
    deadline: float | None = None
    restarts: tuple[float, ...] = ()
    in_a_row: int = 0
    cause: str | None = None
    reason: str | None = None
    next_step: str | None = None
    exit_code: int = 0


Result = tuple[State, tuple[Action, ...]]


def start(limits: Limits, now: float) -> Result:
    """Return the first state and action."""
    return State(limits=limits, since=now), (Action(Do.PREPARE),)


def next_deadline(state: State) -> float | None:
    """Return when the driver must send a Tick, if nothing else happens before; None for never."""
    return state.deadline


def step(state: State, event: Event, now: float) -> Result:
    """Return the next state and what to do. Never raises; an event that does not fit the phase changes nothing."""
    if state.phase in _FINAL or getattr(event, "run", state.run) != state.run:
        return state, ()
    return _HANDLERS[type(event)](state, event, now)


def _enter(state: State, phase: Phase, now: float, *, wait: float | None = None) -> State:
    return replace(state, phase=phase, since=now, deadline=None if wait is None else now + wait)


def _kill(state: State, phase: Phase, now: float) -> Result:
    """Enter one of the phases in which the tree is killed, or try again in it."""
    return _enter(state, phase, now, wait=state.limits.kill_grace), (Action(Do.KILL),)


def _prepared(state: State, _: Prepared, now: float) -> Result:
    if state.phase is not Phase.PREPARING:
        return state, ()
    return _enter(state, Phase.PLANNING, now), (Action(Do.PLAN),)


def _planned(state: State, _: Planned, now: float) -> Result:
    if state.phase is not Phase.PLANNING:
        return state, ()
    starting = _enter(state, Phase.STARTING, now, wait=state.limits.startup_timeout)
    return replace(starting, run=state.run + 1), (Action(Do.SPAWN),)


def _refused(state: State, event: Refused, now: float) -> Result:
    if state.phase not in _WITHOUT_ENGINE and state.phase is not Phase.STARTING:
        return state, ()
    if event.cause in PASSING and state.run > 1:
        # Whatever it is that took the port after our engine had left it: it may go as it came.
        again = Diagnosed(event.cause, event.reason, event.next_step, event.exit_code, retry=True)
        return _retry(state, again, now)
    return _give_up(state, event, now)


def _fired_up(state: State, _: FiredUp, now: float) -> Result:
    if state.phase is not Phase.STARTING:
        return state, ()
    # The start-up deadline goes on: a probe that never passes is a start that never ends.
    return replace(state, phase=Phase.PROBING, since=now), (Action(Do.PROBE),)


def _probe_passed(state: State, _: ProbePassed, now: float) -> Result:
    if state.phase is not Phase.PROBING:
        return state, ()
    return _enter(state, Phase.READY, now, wait=STABLE_AFTER), (Action(Do.RECORD_READY),)


def _engine_ended(state: State, event: EngineEnded | Unhealthy, now: float) -> Result:
    match state.phase:
        case Phase.READY if now - state.since >= STABLE_AFTER:
            return _kill(replace(state, in_a_row=0), Phase.STOPPING_ENGINE, now)
        case Phase.STARTING | Phase.PROBING | Phase.READY:
            return _kill(state, Phase.STOPPING_ENGINE, now)
        case Phase.RESTART_GRACE | Phase.RESTART_DRAINING if isinstance(event, EngineEnded):
            return _kill(state, Phase.RESTART_KILLING, now)  # sweeps up what main left behind
        case Phase.STOP_GRACE | Phase.DRAINING:
            return _kill(state, Phase.STOP_KILLING, now)
    return state, ()


def _tree_gone(state: State, _: TreeGone, now: float) -> Result:
    match state.phase:
        case Phase.STOPPING_ENGINE:
            return _enter(state, Phase.DIAGNOSING, now), (Action(Do.DIAGNOSE),)
        case Phase.RESTART_GRACE | Phase.RESTART_DRAINING | Phase.RESTART_KILLING:
            return _enter(replace(state, in_a_row=0), Phase.RECOVERING, now), (Action(Do.RECOVER),)
        case Phase.STOP_GRACE | Phase.DRAINING | Phase.STOP_KILLING:
            return _stopped(state, now)
    return state, ()


def _recovered(state: State, _: Recovered, now: float) -> Result:
    if state.phase is not Phase.RECOVERING:
        return state, ()
    return _enter(state, Phase.PLANNING, now), (Action(Do.PLAN),)


def _stop(state: State, _: StopRequested, now: float) -> Result:
    match state.phase:
        case Phase.PROBING | Phase.READY:
            return _enter(state, Phase.STOP_GRACE, now, wait=state.limits.drain_grace), ()
        case Phase.RESTART_GRACE:
            return replace(state, phase=Phase.STOP_GRACE), ()  # the same drain goes on
        case Phase.RESTART_DRAINING:
            return replace(state, phase=Phase.DRAINING), ()
        case Phase.STARTING | Phase.STOPPING_ENGINE | Phase.RESTART_KILLING:
            # No SIGTERM: sent to a sglang that starts, it only leaves orphans.
            return _kill(state, Phase.STOP_KILLING, now)
        case Phase.STOP_GRACE | Phase.DRAINING:
            return _kill(state, Phase.STOP_KILLING, now)  # a second stop hurries
        case Phase.STOP_KILLING:
            return state, ()
        case Phase.HOLDING:
            # The exit code is that of the verdict.
            return _enter(state, Phase.GAVE_UP, now), (Action(Do.CANCEL), Action(Do.EXIT))
    stopped, actions = _stopped(state, now)
    return stopped, (Action(Do.CANCEL), *actions)


def _restart(state: State, event: RestartRequested, now: float) -> Result:
    if state.phase is Phase.READY:
        return _enter(state, Phase.RESTART_GRACE, now, wait=state.limits.drain_grace), ()
    if state.phase in _UP and event.at_once:
        return _kill(state, Phase.RESTART_KILLING, now)
    return state, ()


def _tick(state: State, _: Tick, now: float) -> Result:
    if state.deadline is None or now < state.deadline:
        return state, ()
    match state.phase:
        case Phase.READY:
            return _stable(state, now)
        case Phase.STOP_GRACE:
            return _drain(state, Phase.DRAINING, now)
        case Phase.RESTART_GRACE:
            return _drain(state, Phase.RESTART_DRAINING, now)
        case Phase.DRAINING | Phase.STOP_KILLING:
            return _kill(state, Phase.STOP_KILLING, now)
        case Phase.RESTART_DRAINING | Phase.RESTART_KILLING:
            return _kill(state, Phase.RESTART_KILLING, now)
    return _kill(state, Phase.STOPPING_ENGINE, now)  # a start that took too long, or a kill that is tried again


def _stable(state: State, now: float) -> Result:
    """READY has lasted: first STABLE_AFTER, then the whole restart window, which gives the budget back."""
    window_ends = state.since + state.limits.restart_window
    if now < window_ends:
        return replace(state, deadline=window_ends), (Action(Do.RECORD_STABLE),)
    return replace(state, deadline=None, restarts=(), in_a_row=0), (Action(Do.RECORD_STABLE),)


def _drain(state: State, phase: Phase, now: float) -> Result:
    """Send SIGTERM. The grace before it is part of the time that a drain may take."""
    deadline = max(now, state.since + state.limits.drain_timeout)
    return replace(state, phase=phase, deadline=deadline), (Action(Do.DRAIN),)


def _diagnosed(state: State, event: Diagnosed, now: float) -> Result:
    if state.phase is not Phase.DIAGNOSING:
        return state, ()
    if not event.retry:
        return _give_up(state, Refused(event.cause, event.reason, event.next_step, event.exit_code), now)
    return _retry(state, event, now)


def _retry(state: State, event: Diagnosed, now: float) -> Result:
    """Start again after a back-off, as long as the budget lasts."""
    state = replace(state, cause=event.cause, reason=event.reason, next_step=event.next_step)
    recent = tuple(at for at in state.restarts if now - at < state.limits.restart_window)
    if len(recent) >= state.limits.max_restarts:
        spent = f"{event.reason}; {len(recent)} restarts within the window did not help"
        return _give_up(state, Refused(event.cause, spent, event.next_step, BUDGET_EXIT), now)
    # The first restart in a row is immediate, the second waits backoff_initial, and so on.
    delay = (
        min(state.limits.backoff_max, state.limits.backoff_initial * 2.0 ** (state.in_a_row - 1))
        if state.in_a_row
        else 0.0
    )
    counted = replace(state, restarts=(*recent, now), in_a_row=state.in_a_row + 1)
    return _enter(counted, Phase.RECOVERING, now), (Action(Do.RECOVER, delay),)


def _give_up(state: State, refused: Refused, now: float) -> Result:
    hold = state.limits.hold_on_give_up
    over = replace(
        _enter(state, Phase.HOLDING if hold else Phase.GAVE_UP, now),
        cause=refused.cause,
        reason=refused.reason,
        next_step=refused.next_step,
        exit_code=refused.exit_code,
    )
    return over, () if hold else (Action(Do.EXIT),)


def _stopped(state: State, now: float) -> Result:
    return replace(_enter(state, Phase.STOPPED, now), exit_code=0), (Action(Do.EXIT),)


_HANDLERS: dict[type, Callable[[State, Any, float], Result]] = {
    Prepared: _prepared,
    Planned: _planned,
    Refused: _refused,
    FiredUp: _fired_up,
    ProbePassed: _probe_passed,
    EngineEnded: _engine_ended,
    Unhealthy: _engine_ended,
    TreeGone: _tree_gone,
    Diagnosed: _diagnosed,
    Recovered: _recovered,
    StopRequested: _stop,
    RestartRequested: _restart,
    Tick: _tick,
}
