"""Published checkpoints on many boxes with many settings: the engine's own answer is what is expected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import published
import pytest

from entrypoint import plan
from entrypoint.config import settings
from entrypoint.errors import Stop

CASES = {case["id"]: case for case in published.cases() if case["checkpoint"] in published.names()}
ASKED = {name: case for name, case in CASES.items() if "plan" in case.get("engine", {})}
# Of the others the engine itself is asked (`supervisor/engine_answer.py`).
KNOWN = {name for name, case in ASKED.items() if published.read(case["checkpoint"]).well_known}
# Memory is the planner's to refuse: the engine was asked on a machine without any.
SHORT_OF_MEMORY = {"dsv3_fp8@8xh100", "llama70_hicache"}
# The engine refused the flags that an earlier planner chose: a width per rank that its blocks do not divide (whole
# experts on each rank are the way out), and an attention backend that the model forbids.
WHOLE_EXPERTS = {"minimax_m25_fp8@8xrtx6k", "minimax_m25_fp8@8xh100", "q235_fp8@8xrtx6k", "q30_fp8@8xrtx6k"}
WHOLE_EXPERTS |= {"a100_fp8block"}
NAMED_BACKEND = {"gemma4_26b@1xrtx6k", "gemma4_2rtx"}
# Refused for want of a package, and for want of a GPU's library where it was asked.
ASKED_WITHOUT_GPU = {"dsv3_deepep", "mimo_v2@8xh200"}
# Their configs quantise the attention's output, which these headers hold in bf16.
CONTRADICTORY = {"q235_nvfp4", "dsv31_nvfp4", "dsv32_nvfp4"}
# Orders of inputs as built, emptied after the load: two of int32 for each of the experts' matrices
# (compressed_tensors_wNa16_moe.py).
ORDERS = 2 * 60 * 384 * (7168 + 256) * 4
EMPTIED = {"kimi_k2_int4": ORDERS, "kimi_k25": ORDERS}


def planned(case: dict[str, Any]) -> plan.Plan:
    """The plan of one case. Raises Stop."""
    ours = {name: str(value) for name, value in case["env"].items()}
    engine = {name: value for name, value in ours.items() if name.startswith(("SGLANG", "NCCL", "PYTORCH"))}
    given = {f"RELAUNCH_{name}": value for name, value in ours.items() if name not in engine}
    loaded = settings.load({"RELAUNCH_MODEL": "x", **given}, {})
    loaded = replace(loaded, environment={**loaded.environment, **engine})
    return plan.make(loaded, published.boxes()[case["box"]], published.read(case["checkpoint"]))


@pytest.mark.parametrize("name", sorted((KNOWN | NAMED_BACKEND) - ASKED_WITHOUT_GPU - SHORT_OF_MEMORY))
def test_the_plan_accepts_and_refuses_as_the_engine(name: str) -> None:
    case = ASKED[name]
    made, error = planned(case), case["engine"]["plan"]["error"]
    if name in WHOLE_EXPERTS:
        assert error and made.feasible and made.parallel["ep"] == made.parallel["tp"]
    elif name in NAMED_BACKEND:
        assert error and "--attention-backend" not in made.flags
    else:
        assert made.feasible == (error is None), (made.reasons, error)


@pytest.mark.parametrize("name", sorted(SHORT_OF_MEMORY))
def test_what_no_memory_can_hold_is_refused(name: str) -> None:
    assert not planned(ASKED[name]).feasible


WEIGHED = {
    name
    for name in KNOWN
    if ASKED[name]["engine"]["plan"]["weights"] and ASKED[name]["checkpoint"] not in CONTRADICTORY
}


@pytest.mark.parametrize("name", sorted(WEIGHED))
def test_tensors_are_within_one_percent_of_the_engines(name: str) -> None:
    case = ASKED[name]
    made, box = planned(case), published.boxes()[case["box"]]
    weights = case["engine"]["plan"]["weights"] - EMPTIED.get(case["checkpoint"], 0)
    assert published.built(case["checkpoint"], made, box.gpus[0].sm) == pytest.approx(weights, rel=0.01)


@pytest.mark.parametrize("name", sorted(CASES))
def test_no_case_ends_in_anything_but_a_plan_or_one_line(name: str) -> None:
    try:
        made = planned(CASES[name])
    except Stop as stop:
        assert stop.exit_code == 78
    else:
        assert made.feasible or all(made.reasons)
