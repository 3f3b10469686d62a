"""The state machine as named histories of events, and as properties that hold for any history."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrypoint.healing import events as e
from entrypoint.healing import machine as m
from entrypoint.healing.events import Do
from entrypoint.healing.machine import Limits
from entrypoint.healing.phases import Phase

LIMITS = Limits(
    max_restarts=3,
    restart_window=100.0,
    backoff_initial=2.0,
    backoff_max=30.0,
    startup_timeout=50.0,
    drain_timeout=20.0,
    drain_grace=1.0,
    kill_grace=5.0,
)


@dataclass
class Story:
    """Feeds events to the machine and keeps what it answered."""

    state: m.State
    now: float = 0.0
    done: tuple[e.Action, ...] = ()

    @classmethod
    def begin(cls, limits: Limits = LIMITS) -> Story:
        state, actions = m.start(limits, 0.0)
        return cls(state, done=actions)

    def tell(self, *events: e.Event, after: float = 0.0) -> Story:
        self.now += after
        for event in events:
            self.state, self.done = m.step(self.state, event, self.now)
        return self

    def ready(self) -> Story:
        run = self.state.run + 1
        prepared = [e.Prepared()] if self.state.phase is Phase.PREPARING else []
        return self.tell(*prepared, e.Planned(), e.FiredUp(run), e.ProbePassed(run))

    def crash(self, cause: str = "engine_crash", retry: bool = True) -> Story:
        run = self.state.run
        return self.tell(e.EngineEnded(run), e.TreeGone(run), e.Diagnosed(cause, "it died", "look", 70, retry))

    def wait(self) -> Story:
        deadline = m.next_deadline(self.state)
        assert deadline is not None
        self.now = deadline
        return self.tell(e.Tick())

    @property
    def what(self) -> list[Do]:
        return [action.do for action in self.done]


def test_a_start_goes_through_every_phase_in_order() -> None:
    story = Story.begin()
    assert story.what == [Do.PREPARE]
    seen = [story.state.phase]
    for event, action in (
        (e.Prepared(), Do.PLAN),
        (e.Planned(), Do.SPAWN),
        (e.FiredUp(1), Do.PROBE),
        (e.ProbePassed(1), Do.RECORD_READY),
    ):
        story.tell(event)
        seen.append(story.state.phase)
        assert story.what == [action]
    assert seen == [Phase.PREPARING, Phase.PLANNING, Phase.STARTING, Phase.PROBING, Phase.READY]


def test_fired_up_alone_is_not_ready() -> None:
    story = Story.begin().tell(e.Prepared(), e.Planned(), e.FiredUp(1))
    assert story.state.phase is Phase.PROBING


def test_the_first_crash_is_restarted_at_once_and_later_ones_wait_longer() -> None:
    story = Story.begin().ready()
    delays = []
    for _ in range(3):
        story.crash()
        assert story.what == [Do.RECOVER]
        delays.append(story.done[0].delay)
        story.tell(e.Recovered()).ready()
    assert delays == [0.0, 2.0, 4.0]


def test_the_budget_ends_with_seventy_and_the_cause() -> None:
    story = Story.begin().ready()
    for _ in range(3):
        story.crash().tell(e.Recovered()).ready()
    story.crash("nan_output")
    assert story.state.phase is Phase.GAVE_UP
    assert (story.state.exit_code, story.state.cause) == (70, "nan_output")
    assert story.what == [Do.EXIT]


def test_restarts_outside_the_window_do_not_count() -> None:
    story = Story.begin().ready()
    for _ in range(6):
        story.crash().tell(e.Recovered()).ready()
        story.now += 60.0
    assert story.state.phase is Phase.READY


def test_stable_running_gives_the_budget_back() -> None:
    story = Story.begin().ready().crash().tell(e.Recovered()).ready()
    assert len(story.state.restarts) == 1
    story.wait()
    assert story.what == [Do.RECORD_STABLE]
    story.wait()
    assert (story.state.restarts, story.state.in_a_row) == ((), 0)


def test_after_a_stable_run_the_next_crash_is_restarted_at_once() -> None:
    story = Story.begin().ready().crash().tell(e.Recovered()).ready()
    story.now += m.STABLE_AFTER
    assert story.crash().done[0].delay == 0.0


def test_a_hopeless_cause_is_not_retried() -> None:
    story = Story.begin().ready().crash("driver_mismatch", retry=False)
    assert story.state.phase is Phase.GAVE_UP
    assert story.state.next_step == "look"


def test_giving_up_can_hold_until_stopped_and_leaves_with_the_verdicts_code() -> None:
    story = Story.begin(replace(LIMITS, hold_on_give_up=True)).tell(e.Refused("hub_gated", "no", "token", 77))
    assert (story.state.phase, story.state.phase.public, story.what) == (Phase.HOLDING, Phase.GAVE_UP, [])
    story.tell(e.StopRequested())
    assert (story.state.phase, story.what, story.state.exit_code) == (Phase.GAVE_UP, [Do.CANCEL, Do.EXIT], 77)
    assert story.tell(e.StopRequested()).what == []


def test_a_start_that_never_ends_is_ended() -> None:
    story = Story.begin().tell(e.Prepared(), e.Planned()).wait()
    assert (story.state.phase, story.what) == (Phase.STOPPING_ENGINE, [Do.KILL])


def test_a_probe_that_never_passes_is_under_the_start_up_deadline_too() -> None:
    story = Story.begin().tell(e.Prepared(), e.Planned(), e.FiredUp(1))
    assert m.next_deadline(story.state) == LIMITS.startup_timeout


def test_events_of_an_old_engine_change_nothing() -> None:
    story = Story.begin().ready().crash().tell(e.Recovered()).ready()
    before = story.state
    story.tell(e.EngineEnded(1), e.Unhealthy(1, "old"), e.FiredUp(1), e.TreeGone(1))
    assert story.state == before


@pytest.mark.parametrize("phase", ["preparing", "planning", "recovering"])
def test_stop_without_an_engine_stops_at_once(phase: str) -> None:
    story = Story.begin()
    if phase != "preparing":
        story.tell(e.Prepared())
    if phase == "recovering":
        story.tell(e.Planned()).crash()
    story.tell(e.StopRequested())
    assert (story.state.phase, story.state.exit_code) == (Phase.STOPPED, 0)
    assert story.what == [Do.CANCEL, Do.EXIT]


def test_stop_while_starting_kills_the_tree_since_sigterm_would_leave_orphans() -> None:
    story = Story.begin().tell(e.Prepared(), e.Planned(), e.StopRequested())
    assert (story.state.phase, story.what) == (Phase.STOP_KILLING, [Do.KILL])
    assert story.tell(e.TreeGone(1)).state.phase is Phase.STOPPED


def test_stop_when_ready_waits_for_the_balancer_then_drains_then_kills() -> None:
    story = Story.begin().ready().tell(e.StopRequested())
    assert (story.state.phase, story.state.phase.public, story.what) == (Phase.STOP_GRACE, Phase.DRAINING, [])
    story.wait()
    assert story.what == [Do.DRAIN]
    story.wait()
    assert (story.what, story.now) == ([Do.KILL], LIMITS.drain_timeout)
    assert story.tell(e.TreeGone(1)).state.exit_code == 0


def test_an_engine_that_drains_ends_in_stopped() -> None:
    story = Story.begin().ready().tell(e.StopRequested()).wait().tell(e.EngineEnded(1))
    assert story.what == [Do.KILL]  # sweeps up what main left behind
    assert story.tell(e.TreeGone(1)).what == [Do.EXIT]


def test_a_second_stop_hurries_and_a_third_changes_nothing() -> None:
    story = Story.begin().ready().tell(e.StopRequested(), e.StopRequested())
    assert story.what == [Do.KILL]
    story.tell(e.StopRequested())
    assert (story.state.phase, story.what) == (Phase.STOP_KILLING, [])


def test_stop_during_a_crash_wins() -> None:
    story = Story.begin().ready().tell(e.EngineEnded(1), e.StopRequested(), e.TreeGone(1))
    assert story.state.phase is Phase.STOPPED


def test_a_planned_restart_drains_and_spends_no_budget() -> None:
    story = Story.begin().ready().tell(e.RestartRequested())
    assert (story.state.phase, story.state.phase.public) == (Phase.RESTART_GRACE, Phase.STOPPING_ENGINE)
    assert story.wait().what == [Do.DRAIN]
    story.tell(e.EngineEnded(1), e.TreeGone(1))
    assert story.what == [Do.RECOVER]
    story.tell(e.Recovered()).ready()
    assert (story.state.phase, story.state.restarts) == (Phase.READY, ())


def test_a_planned_restart_waits_for_ready() -> None:
    story = Story.begin().tell(e.RestartRequested())
    assert story.state.phase is Phase.PREPARING


def test_a_start_ended_for_another_node_spends_no_budget() -> None:
    story = Story.begin().tell(e.Prepared(), e.Planned(), e.RestartRequested(at_once=True))
    assert (story.state.phase, story.what) == (Phase.RESTART_KILLING, [Do.KILL])
    story.tell(e.TreeGone(1))
    assert story.what == [Do.RECOVER]
    story.tell(e.Recovered())
    assert (story.state.phase, story.state.restarts) == (Phase.PLANNING, ())


def test_a_stop_while_a_start_is_killed_for_another_node_never_sends_sigterm() -> None:
    """SIGTERM to a starting sglang leaves orphans, and a drain would wait for requests that nobody sent."""
    story = Story.begin().tell(e.Prepared(), e.Planned(), e.RestartRequested(at_once=True), e.StopRequested())
    assert (story.state.phase, story.what) == (Phase.STOP_KILLING, [Do.KILL])
    assert m.next_deadline(story.state) == LIMITS.kill_grace
    assert story.tell(e.EngineEnded(1)).what == []
    assert story.tell(e.TreeGone(1)).state.phase is Phase.STOPPED


def test_a_stop_during_a_planned_drain_goes_on_with_it() -> None:
    story = Story.begin().ready().tell(e.RestartRequested()).wait()
    before = m.next_deadline(story.state)
    story.tell(e.StopRequested(), after=2.0)
    assert (story.state.phase, story.what, m.next_deadline(story.state)) == (Phase.DRAINING, [], before)


def test_every_phase_shows_as_one_of_the_ten_of_the_interface() -> None:
    assert len({phase.public for phase in Phase}) == 10
    assert all(phase.public.public is phase.public for phase in Phase)


# Sums of seconds taken in another order differ in the last bits.
FLOAT_NOISE = 1e-6

EVENTS = st.sampled_from(
    [
        lambda run: e.Prepared(),
        lambda run: e.Planned(),
        lambda run: e.Refused("disk_full", "full", "clean", 73),
        lambda run: e.FiredUp(run),
        lambda run: e.ProbePassed(run),
        lambda run: e.EngineEnded(run),
        lambda run: e.Unhealthy(run, "hang"),
        lambda run: e.TreeGone(run),
        lambda run: e.Diagnosed("engine_crash", "died", "", 70, True),
        lambda run: e.Diagnosed("gpu_lost", "gone", "", 69, False),
        lambda run: e.Recovered(),
        lambda run: e.RestartRequested(),
        lambda run: e.RestartRequested(at_once=True),
        lambda run: e.Tick(),
    ]
)
HISTORIES = st.lists(st.tuples(EVENTS, st.floats(0, 40), st.integers(-1, 0)), max_size=60)


def replay(history: list) -> list[tuple[m.State, tuple[e.Action, ...], float]]:
    state, actions = m.start(LIMITS, 0.0)
    now, seen = 0.0, [(state, actions, 0.0)]
    for make, wait, old in history:
        now += wait
        state, actions = m.step(state, make(max(0, state.run + old)), now)
        seen.append((state, actions, now))
    return seen


@given(HISTORIES)
@settings(max_examples=300, deadline=None)
def test_never_more_restarts_than_the_budget(history: list) -> None:
    times = [now for _, actions, now in replay(history) for a in actions if a.do is Do.RECOVER]
    planned = sum(isinstance(make(0), e.RestartRequested) for make, _, _ in history)
    for at in times:
        inside = [t for t in times if at <= t < at + LIMITS.restart_window]
        assert len(inside) <= LIMITS.max_restarts + planned


@given(HISTORIES)
@settings(max_examples=300, deadline=None)
def test_gave_up_always_has_a_reason_and_a_code(history: list) -> None:
    for state, _, _ in replay(history):
        if state.phase is Phase.GAVE_UP:
            assert state.cause and state.reason and state.exit_code


@given(HISTORIES)
@settings(max_examples=300, deadline=None)
def test_from_any_history_a_stop_reaches_stopped_in_time(history: list) -> None:
    state, _, now = replay(history)[-1]
    gave_up = state.phase is Phase.GAVE_UP
    asked = now
    state, actions = m.step(state, e.StopRequested(), now)
    for _ in range(10):
        if any(action.do is Do.EXIT for action in actions) or gave_up:
            break
        if any(action.do is Do.KILL for action in actions):
            # The driver's promise: a kill ends in TreeGone within its grace.
            now += LIMITS.kill_grace
            state, actions = m.step(state, e.TreeGone(state.run), now)
            continue
        deadline = m.next_deadline(state)
        assert deadline is not None, "a machine that waits for nothing never stops"
        now = deadline
        state, actions = m.step(state, e.Tick(), now)
    assert state.phase in (Phase.STOPPED, Phase.GAVE_UP)
    assert now <= asked + LIMITS.drain_timeout + LIMITS.kill_grace + FLOAT_NOISE


@given(HISTORIES)
@settings(max_examples=200, deadline=None)
def test_whatever_happens_a_faithful_driver_ends_in_a_named_place(history: list) -> None:
    """Feed what the actions ask for: the machine never waits for something that nobody will send."""
    state, _, now = replay(history)[-1]
    waiting = {
        Phase.PREPARING: lambda s: e.Prepared(),
        Phase.PLANNING: lambda s: e.Planned(),
        Phase.STARTING: lambda s: e.FiredUp(s.run),
        Phase.PROBING: lambda s: e.ProbePassed(s.run),
        Phase.DIAGNOSING: lambda s: e.Diagnosed("x", "y", "", 70, True),
        Phase.RECOVERING: lambda s: e.Recovered(),
    }
    for _ in range(20):
        if state.phase in (Phase.READY, Phase.STOPPED, Phase.GAVE_UP):
            break
        if state.phase.public in (Phase.STOPPING_ENGINE, Phase.DRAINING):
            event: e.Event = e.TreeGone(state.run)
        else:
            event = waiting[state.phase](state)
        state, _ = m.step(state, event, now)
    assert state.phase in (Phase.READY, Phase.STOPPED, Phase.GAVE_UP)


@given(HISTORIES)
@settings(max_examples=300, deadline=None)
def test_sigterm_is_only_sent_to_an_engine_that_answered(history: list) -> None:
    """Between a spawn and the first probe a SIGTERM leaves orphans, whatever was asked for in between."""
    answered = False
    for _, actions, _ in replay([*history, (lambda run: e.StopRequested(), 0.0, 0), *[(TICK, 100.0, 0)] * 4]):
        does = [action.do for action in actions]
        answered = Do.SPAWN not in does and (answered or Do.PROBE in does)
        assert answered or Do.DRAIN not in does


def TICK(run: int) -> e.Event:
    return e.Tick()


def test_a_port_that_is_taken_at_a_restart_uses_the_budget() -> None:
    taken = e.Refused("port_in_use", "port 30000 is already in use", "end that process", 69)
    story = Story.begin().ready().crash().tell(e.Recovered(), e.Planned(), taken)
    assert story.state.phase is Phase.RECOVERING and story.state.cause == "port_in_use"
    assert story.done == (e.Action(Do.RECOVER, 2.0),)
    story.tell(e.Recovered(), e.Planned(), taken)
    assert story.done == (e.Action(Do.RECOVER, 4.0),)
    story.tell(e.Recovered(), e.Planned(), taken)
    assert (story.state.phase, story.state.exit_code) == (Phase.GAVE_UP, m.BUDGET_EXIT)


def test_a_port_that_is_taken_at_the_first_start_is_refused_at_once() -> None:
    story = Story.begin().tell(e.Refused("port_in_use", "taken", "end that process", 69))
    assert (story.state.phase, story.state.exit_code) == (Phase.GAVE_UP, 69)
