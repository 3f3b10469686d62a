"""The search: which arms there are, what is tried next, what survives a kill, and what is kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrypoint.config import loading
from entrypoint.errors import Stop
from entrypoint.plan import Change, Learned
from entrypoint.state.tuned import Tuned
from entrypoint.supervisor.planning import PlanInputs, gather, plan_document
from entrypoint.tuning import search
from entrypoint.tuning.arms import UNTUNED, Arm, candidates, parse
from entrypoint.tuning.journal import Journal
from entrypoint.tuning.search import Measured
from entrypoint.tuning.trial import Failed
from entrypoint.tuning.tune import Options, Tuner

CHUNK, FEWER, MORE = (Arm(((name, value),)) for name, value in (("chunk", 1), ("requests", 4), ("requests", 16)))


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "RELAUNCH_PRESET": "rehearsal-generate",
        "RELAUNCH_STATE_DIR": str(tmp_path / "state"),
        "RELAUNCH_CACHE_DIR": str(tmp_path / "cache"),
    }


@pytest.fixture
def inputs(environ: dict[str, str]) -> PlanInputs:
    return gather(environ)


def results(**scores: float | None) -> dict[str, Measured]:
    by_name = {"untuned": UNTUNED, "chunk": CHUNK, "fewer": FEWER, "more": MORE}
    return {by_name[name].name: Measured(by_name[name], score) for name, score in scores.items()}


class Arms:
    """Scores by arm, each a number, a function of how often it was measured, or the text with which it fails."""

    def __init__(self, **scores: Any) -> None:
        self.scores, self.tried = scores, list[str]()

    def __call__(self, arm: Arm) -> float:
        self.tried.append(arm.name)
        score = self.scores[arm.name.replace("max_running_requests=", "r").replace("chunked_prefill_size=", "c")]
        if isinstance(score, str):
            raise Failed(score)
        return float(score(self.tried.count(arm.name)) if callable(score) else score)


def tuner(inputs: PlanInputs, measure: Callable[[Arm], float], budget: float = 1e6, **asked: Any) -> Tuner:
    options = Options("balanced", budget, own=tuple(map(parse, asked.pop("own", ()))), only=True)
    journal = Journal(inputs.loaded.settings.state_dir, {"fingerprint": inputs.fingerprint})
    clock = iter(range(10**6))
    return Tuner(inputs, options, journal, measure, lambda *_: None, lambda: float(next(clock)))


OWN = ["max_running_requests=4", "chunked_prefill_size=256"]


# -- arms -----------------------------------------------------------------------------------------------------


def test_every_arm_is_a_plan_of_its_own_that_the_planner_accepts(inputs: PlanInputs) -> None:
    plan = inputs.plan(())

    def accepts(arm: Arm) -> Any:
        made = inputs.plan(arm.changes(plan, ""))
        return made if made.feasible else None

    found = candidates(plan, "throughput", accepts)
    assert {arm.name for arm in found} >= {"max_running_requests=16", "max_running_requests=4"}
    assert len({inputs.plan(arm.changes(plan, "")).flags for arm in found} | {plan.flags}) == len(found) + 1
    assert candidates(plan, "throughput", lambda arm: None) == []


def test_the_operator_names_an_arm_of_several_settings() -> None:
    arm = parse("chunked_prefill_size=2048 --disable-custom-all-reduce NCCL_MIN_NCHANNELS=8")
    assert dict(arm.settings) == {
        "chunked_prefill_size": 2048,
        "--disable-custom-all-reduce": True,
        "NCCL_MIN_NCHANNELS": 8,
    }
    with pytest.raises(Stop, match="chunk is no planned setting"):
        parse("chunk=5")


# -- the search -----------------------------------------------------------------------------------------------


def test_steps_are_tried_one_by_one_and_the_better_ones_together() -> None:
    steps = [CHUNK, FEWER, MORE]
    assert search.next_arm(steps, {}) == UNTUNED
    assert search.next_arm(steps, results(untuned=10)) == CHUNK
    done = results(untuned=10, chunk=11, fewer=9, more=12)
    together = search.next_arm(steps, done)
    assert together is not None and together.name == "requests=16 chunk=1"
    assert search.next_arm(steps, {**done, together.name: Measured(together, 13.0)}) is None
    assert search.best({**done, together.name: Measured(together, 13.0)}) == together


def test_what_was_dropped_and_what_is_worse_is_never_put_together() -> None:
    done = results(untuned=10, chunk=None, fewer=9, more=12)
    assert search.next_arm([CHUNK, FEWER, MORE], done) is None and search.best(done) == MORE
    assert search.best(results(untuned=10, chunk=None, fewer=9)) is None


@pytest.mark.parametrize(
    ("untuned", "tuned", "kept"),
    [
        ([100, 101], [110, 112], True),
        ([100, 111], [110, 112], False),  # one untuned measurement was as good
        ([100, 100], [100.5, 100.5], False),  # below what is worth a setting
        ([100, 100], [90, 91], False),
    ],
)
def test_only_what_is_better_every_time_is_kept(untuned: list[float], tuned: list[float], kept: bool) -> None:
    assert search.verdict(untuned, tuned)["kept"] is kept


def test_an_arm_that_dies_is_dropped_with_its_cause_and_the_search_goes_on(inputs: PlanInputs) -> None:
    measure = Arms(untuned=100, r4="oom: out of memory", c256=120)
    found = tuner(inputs, measure, own=OWN).run()
    assert {arm["name"]: arm["why"] for arm in found["arms"]}["max_running_requests=4"] == "oom: out of memory"
    assert found["winner"] == "chunked_prefill_size=256" and found["kept"] and found["gain"] == 0.2


def test_the_winner_is_what_the_next_start_is_planned_with(inputs: PlanInputs, environ: dict[str, str]) -> None:
    tuner(inputs, Arms(untuned=100, r4=90, c256=120), own=OWN).run()
    document, _ = plan_document(environ)
    decision = next(row for row in document["decisions"] if row["setting"] == "chunked_prefill_size")
    assert document["chunked_prefill_size"] == 256
    assert decision["source"] == "tuned" and "tuned for balanced, load chat: +20.0%" in decision["reason"]


def test_a_gain_that_does_not_come_again_is_not_kept(inputs: PlanInputs, environ: dict[str, str]) -> None:
    lucky = Arms(untuned=100, r4=90, c256=lambda times: 120 if times == 1 else 100)
    found = tuner(inputs, lucky, own=OWN).run()
    assert found["kept"] is False and found["why"] == "the gain is within the noise"
    assert plan_document(environ)[0]["chunked_prefill_size"] == inputs.plan(()).chunked_prefill_size


def test_both_are_measured_in_turn_at_the_end(inputs: PlanInputs) -> None:
    measure = Arms(untuned=100, r4=90, c256=120)
    tuner(inputs, measure, budget=0, own=OWN).run()
    assert measure.tried[3:] == ["untuned", "chunked_prefill_size=256"] * search.LEAST_PAIRS


def test_a_winner_that_dies_at_the_end_gives_way_to_the_next(inputs: PlanInputs) -> None:
    def dying(times: int) -> float:
        if times > 1:
            raise Failed("hang: no tokens")
        return 130

    found = tuner(inputs, Arms(untuned=100, r4=120, c256=dying, **{"c256 r4": 90}), own=OWN).run()
    assert found["winner"] == "max_running_requests=4" and found["kept"]


def test_a_search_that_was_killed_goes_on_where_it_was(inputs: PlanInputs) -> None:
    class Killed(BaseException):
        pass

    def killed(times: int) -> float:
        raise Killed

    with pytest.raises(Killed):
        tuner(inputs, Arms(untuned=100, r4=90, c256=killed), own=OWN).run()
    measure = Arms(untuned=100, r4=90, c256=120)
    found = tuner(inputs, measure, budget=0, own=OWN).run()
    assert measure.tried[0] == "chunked_prefill_size=256" and found["kept"]


def test_an_arm_that_takes_relaunch_with_it_twice_is_not_tried_a_third_time(inputs: PlanInputs) -> None:
    for _ in range(2):
        with pytest.raises(SystemError):
            tuner(inputs, Arms(untuned=100, r4=_raise(SystemError()), c256=90), own=OWN).run()
    measure = Arms(untuned=100, r4=90, c256=90)
    found = tuner(inputs, measure, own=OWN).run()
    assert "max_running_requests=4" not in measure.tried
    assert found["arms"][1]["why"] == "relaunch ended twice while it was tried"


def _raise(error: BaseException) -> Callable[[int], float]:
    def raising(_: int) -> float:
        raise error

    return raising


def test_an_untuned_plan_that_cannot_be_measured_is_said(inputs: PlanInputs) -> None:
    with pytest.raises(Stop, match="the untuned plan could not be measured: oom"):
        tuner(inputs, Arms(untuned="oom"), own=OWN).run()


# -- what was tuned, in a plan --------------------------------------------------------------------------------


def tuned(*rows: tuple[str, Any]) -> Learned:
    return Learned(tuned=tuple(Change(name, None, value, "tuned") for name, value in rows))


def test_what_the_operator_sets_and_what_was_learned_win_over_what_was_tuned(environ: dict[str, str]) -> None:
    asked = {**environ, "RELAUNCH_MAX_RUNNING_REQUESTS": "3", "RELAUNCH_ENGINE_ARGS": "--max-prefill-tokens 999"}
    inputs = gather(asked)
    learned = replace(
        tuned(("max_running_requests", 16), ("chunked_prefill_size", 256), ("--max-prefill-tokens", 777)),
        changes=(Change("chunked_prefill_size", 512, 128, "ran out of memory"),),
    )
    plan = replace(inputs, learned=learned).plan()
    assert (plan.max_running_requests, plan.chunked_prefill_size) == (3, 128)
    assert plan.flags[plan.flags.index("--max-prefill-tokens") + 1] == "999"


def test_a_plan_that_does_not_fit_with_what_was_tuned_is_made_without(inputs: PlanInputs) -> None:
    plan = replace(inputs, learned=tuned(("max_running_requests", 0))).plan()
    assert plan.feasible and plan.max_running_requests == inputs.plan(()).max_running_requests
    assert any(warning.startswith("tuned settings are not used") for warning in plan.warnings)


def test_reset_tuned_forgets_it(inputs: PlanInputs, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    from entrypoint import cli

    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    stored = Tuned(loading.load().settings.state_dir, inputs.fingerprint)
    stored.write((Change("chunked_prefill_size", 512, 256, "tuned"),), {"goal": "balanced"})
    (stored.state_dir / "known-good").mkdir()
    assert len(stored.read()) == 1
    assert cli.main(["reset", "--tuned"]) == 0
    assert stored.read() == () and (stored.state_dir / "known-good").is_dir()
