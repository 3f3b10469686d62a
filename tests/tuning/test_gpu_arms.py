"""The arms on boxes with GPUs: all of them plans that fit, each of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))
from planned import adds_up, h200, make, rtx

from entrypoint.plan import Learned, Plan
from entrypoint.tuning.arms import GOALS, Arm, candidates


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize(("model", "box"), [("glm-5-nvfp4", rtx(8)), ("qwen3-30b-a3b", h200(2))])
def test_the_arms_of_a_box_fit_and_differ(model: str, box: object, goal: str) -> None:
    plan = make(model, box)  # type: ignore[arg-type]
    made: dict[str, Plan] = {}

    def accepts(arm: Arm) -> Plan | None:
        tried = make(model, box, learned=Learned(tuned=arm.changes(plan, "")))  # type: ignore[arg-type]
        used = tried.feasible and not any("tuned settings" in warning for warning in tried.warnings)
        return made.setdefault(arm.name, tried) if used else None

    arms = candidates(plan, goal, accepts)
    assert len(arms) >= 5 and len({made[arm.name].flags + tuple(made[arm.name].env.items()) for arm in arms}) == len(
        arms
    )
    assert all(adds_up(made[arm.name]) for arm in arms)
    assert {name for arm in arms for name, _ in arm.settings} >= {"chunked_prefill_size", "NCCL_MIN_NCHANNELS"}
    assert plan.flags not in {made[arm.name].flags for arm in arms if "NCCL" not in arm.name}
