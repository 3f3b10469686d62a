"""The state machine as named histories of events, and as properties that hold for any history."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrypoint.healing import machine as m
from entrypoint.healing.machine import Do, Limits, Phase

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
    done: tuple[m.Action, ...] = ()

    @classmethod
    def begin(cls, limits: Limits = LIMITS) -> Story:
        state, actions = m.start(limits, 0.0)
        return cls(state, done=actions)

    def tell(self, *events: m.Event, after: float = 0.0) -> Story:
        self.now += after
        for event in events:
            self.state, self.done = m.step(self.state, event, self.now)
        return self

    def ready(self) -> Story:
        run = self.state.run + 1
        prepared = [m.Prepared()] if self.state.phase is Phase.PREPARING else []
        return self.tell(*prepared, m.Planned(), m.FiredUp(run), m.ProbePassed(run))

    def crash(self, cause: str = "engine_crash", retry: bool = True) -> Story:
        run = self.state.run
        return self.tell(m.EngineEnded(run), m.TreeGone(run), m.Diagnosed(cause, "it died", "look", 70, retry))

    def wait(self) -> Story:
        deadline = m.next_deadline(self.state)
        assert deadline is not None
        self.now = deadline
        return self.tell(m.Tick())

    @property
    def what(self) -> list[Do]:
        return [action.do for action in self.done]


def test_a_start_goes_through_every_phase_in_order() -> None:
    story = Story.begin()
    assert story.what == [Do.PREPARE]
    seen = [story.state.phase]
    for event, action in (
        (m.Prepared(), Do.PLAN),
        (m.Planned(), Do.SPAWN),
        (m.FiredUp(1), Do.PROBE),
        (m.ProbePassed(1), Do.RECORD_READY),
    ):
        story.tell(event)
        seen.append(story.state.phase)
        assert story.what == [action]
    assert seen == [Phase.PREPARING, Phase.PLANNING, Phase.STARTING, Phase.PROBING, Phase.READY]


def test_fired_up_alone_is_not_ready() -> None:
    story = Story.begin().tell(m.Prepared(), m.Planned(), m.FiredUp(1))
    assert story.state.phase is Phase.PROBING


def test_the_first_crash_is_restarted_at_once_and_later_ones_wait_longer() -> None:
    story = Story.begin().ready()
    delays = []
    for _ in range(3):
        story.crash()
        assert story.what == [Do.RECOVER]
        delays.append(story.done[0].delay)
        story.tell(m.Recovered()).ready()
    assert delays == [0.0, 2.0, 4.0]


def test_the_budget_ends_with_seventy_and_the_cause() -> None:
    story = Story.begin().ready()
    for _ in range(3):
        story.crash().tell(m.Recovered()).ready()
    story.crash("nan_output")
    assert story.state.phase is Phase.GAVE_UP
    assert (story.state.exit_code, story.state.cause) == (70, "nan_output")
    assert story.what == [Do.EXIT]


def test_restarts_outside_the_window_do_not_count() -> None:
    story = Story.begin().ready()
    for _ in range(6):
        story.crash().tell(m.Recovered()).ready()
        story.now += 60.0
    assert story.state.phase is Phase.READY


def test_stable_running_gives_the_budget_back() -> None:
    story = Story.begin().ready().crash().tell(m.Recovered()).ready()
    assert len(story.state.restarts) == 1
    story.wait()
    assert story.what == [Do.RECORD_STABLE]
    story.wait()
    assert (story.state.restarts, story.state.in_a_row) == ((), 0)


def test_after_a_stable_run_the_next_crash_is_restarted_at_once() -> None:
    story = Story.begin().ready().crash().tell(m.Recovered()).ready()
    story.now += m.STABLE_AFTER
    assert story.crash().done[0].delay == 0.0


def test_a_hopeless_cause_is_not_retried() -> None:
    story = Story.begin().ready().crash("driver_mismatch", retry=False)
    assert story.state.phase is Phase.GAVE_UP
    assert story.state.next_step == "look"


def test_giving_up_can_hold_until_stopped_and_leaves_with_the_verdicts_code() -> None:
    story = Story.begin(replace(LIMITS, hold_on_give_up=True)).tell(m.Refused("hub_gated", "no", "token", 77))
    assert (story.state.phase, story.what) == (Phase.GAVE_UP, [])
    story.tell(m.StopRequested())
    assert (story.what, story.state.exit_code) == ([Do.CANCEL, Do.EXIT], 77)


def test_a_start_that_never_ends_is_ended() -> None:
    story = Story.begin().tell(m.Prepared(), m.Planned()).wait()
    assert (story.state.phase, story.what) == (Phase.STOPPING_ENGINE, [Do.KILL])


def test_a_probe_that_never_passes_is_under_the_start_up_deadline_too() -> None:
    story = Story.begin().tell(m.Prepared(), m.Planned(), m.FiredUp(1))
    assert m.next_deadline(story.state) == LIMITS.startup_timeout


def test_events_of_an_old_engine_change_nothing() -> None:
    story = Story.begin().ready().crash().tell(m.Recovered()).ready()
    before = story.state
    story.tell(m.EngineEnded(1), m.Unhealthy(1, "old"), m.FiredUp(1), m.TreeGone(1))
    assert story.state == before


@pytest.mark.parametrize("phase", ["preparing", "planning", "recovering"])
def test_stop_without_an_engine_stops_at_once(phase: str) -> None:
    story = Story.begin()
    if phase != "preparing":
        story.tell(m.Prepared())
    if phase == "recovering":
        story.tell(m.Planned()).crash()
    story.tell(m.StopRequested())
    assert (story.state.phase, story.state.exit_code) == (Phase.STOPPED, 0)
    assert story.what == [Do.CANCEL, Do.EXIT]


def test_stop_while_starting_kills_the_tree_since_sigterm_would_leave_orphans() -> None:
    story = Story.begin().tell(m.Prepared(), m.Planned(), m.StopRequested())
    assert (story.state.phase, story.what) == (Phase.DRAINING, [Do.KILL])
    assert story.tell(m.TreeGone(1)).state.phase is Phase.STOPPED


def test_stop_when_ready_waits_for_the_balancer_then_drains_then_kills() -> None:
    story = Story.begin().ready().tell(m.StopRequested())
    assert (story.state.phase, story.what) == (Phase.DRAINING, [])
    story.wait()
    assert story.what == [Do.DRAIN]
    story.wait()
    assert (story.what, story.now) == ([Do.KILL], LIMITS.drain_timeout)
    assert story.tell(m.TreeGone(1)).state.exit_code == 0


def test_an_engine_that_drains_ends_in_stopped() -> None:
    story = Story.begin().ready().tell(m.StopRequested()).wait().tell(m.EngineEnded(1))
    assert story.what == [Do.KILL]  # sweeps up what main left behind
    assert story.tell(m.TreeGone(1)).what == [Do.EXIT]


def test_a_second_stop_hurries_and_a_third_changes_nothing() -> None:
    story = Story.begin().ready().tell(m.StopRequested(), m.StopRequested())
    assert story.what == [Do.KILL]
    story.tell(m.StopRequested())
    assert (story.state.phase, story.what) == (Phase.DRAINING, [])


def test_stop_during_a_crash_wins() -> None:
    story = Story.begin().ready().tell(m.EngineEnded(1), m.StopRequested(), m.TreeGone(1))
    assert story.state.phase is Phase.STOPPED


def test_a_planned_restart_drains_and_spends_no_budget() -> None:
    story = Story.begin().ready().tell(m.RestartRequested())
    assert story.state.phase is Phase.STOPPING_ENGINE
    assert story.wait().what == [Do.DRAIN]
    story.tell(m.EngineEnded(1), m.TreeGone(1))
    assert story.what == [Do.RECOVER]
    story.tell(m.Recovered()).ready()
    assert (story.state.phase, story.state.restarts) == (Phase.READY, ())


def test_a_planned_restart_waits_for_ready() -> None:
    story = Story.begin().tell(m.RestartRequested())
    assert story.state.phase is Phase.PREPARING


def test_a_start_ended_for_another_node_spends_no_budget() -> None:
    story = Story.begin().tell(m.Prepared(), m.Planned(), m.RestartRequested(at_once=True))
    assert (story.state.phase, story.what) == (Phase.STOPPING_ENGINE, [Do.KILL])
    story.tell(m.TreeGone(1))
    assert story.what == [Do.RECOVER]
    story.tell(m.Recovered())
    assert (story.state.phase, story.state.restarts, story.state.planned) == (Phase.PLANNING, (), False)


EVENTS = st.sampled_from(
    [
        lambda run: m.Prepared(),
        lambda run: m.Planned(),
        lambda run: m.Refused("disk_full", "full", "clean", 73),
        lambda run: m.FiredUp(run),
        lambda run: m.ProbePassed(run),
        lambda run: m.EngineEnded(run),
        lambda run: m.Unhealthy(run, "hang"),
        lambda run: m.TreeGone(run),
        lambda run: m.Diagnosed("engine_crash", "died", "", 70, True),
        lambda run: m.Diagnosed("gpu_lost", "gone", "", 69, False),
        lambda run: m.Recovered(),
        lambda run: m.RestartRequested(),
        lambda run: m.RestartRequested(at_once=True),
        lambda run: m.Tick(),
    ]
)
HISTORIES = st.lists(st.tuples(EVENTS, st.floats(0, 40), st.integers(-1, 0)), max_size=60)


def replay(history: list) -> list[tuple[m.State, tuple[m.Action, ...], float]]:
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
    planned = sum(isinstance(make(0), m.RestartRequested) for make, _, _ in history)
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
    state, actions = m.step(state, m.StopRequested(), now)
    for _ in range(10):
        if any(action.do is Do.EXIT for action in actions) or gave_up:
            break
        if any(action.do is Do.KILL for action in actions):
            # The driver's promise: a kill ends in TreeGone within its grace.
            now += LIMITS.kill_grace
            state, actions = m.step(state, m.TreeGone(state.run), now)
            continue
        deadline = m.next_deadline(state)
        assert deadline is not None, "a machine that waits for nothing never stops"
        now = deadline
        state, actions = m.step(state, m.Tick(), now)
    assert state.phase in (Phase.STOPPED, Phase.GAVE_UP)
    assert now - asked <= LIMITS.drain_timeout + LIMITS.kill_grace


@given(HISTORIES)
@settings(max_examples=200, deadline=None)
def test_whatever_happens_a_faithful_driver_ends_in_a_named_place(history: list) -> None:
    """Feed what the actions ask for: the machine never waits for something that nobody will send."""
    state, actions, now = replay(history)[-1]
    waiting = {
        Phase.PREPARING: lambda s: m.Prepared(),
        Phase.PLANNING: lambda s: m.Planned(),
        Phase.STARTING: lambda s: m.FiredUp(s.run),
        Phase.PROBING: lambda s: m.ProbePassed(s.run),
    }
    for _ in range(20):
        if state.phase in (Phase.READY, Phase.STOPPED, Phase.GAVE_UP):
            break
        if state.phase in (Phase.STOPPING_ENGINE, Phase.DRAINING):
            event: m.Event = m.TreeGone(state.run)
        elif state.phase is Phase.RECOVERING:
            event = m.Recovered() if Do.RECOVER in [a.do for a in actions] else m.Diagnosed("x", "y", "", 70, True)
        else:
            event = waiting[state.phase](state)
        state, actions = m.step(state, event, now)
    assert state.phase in (Phase.READY, Phase.STOPPED, Phase.GAVE_UP)
