"""What the installed engine says of a plan: for whoever asks, and for models that are not known well enough."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec

from ..checkpoint import engine_sizes
from ..checkpoint.model import Checkpoint
from ..engine import acceptance
from ..plan import Plan

# Flags of ours that say how weights are read, of which none are.
_READING = ("--load-format", "--model-loader-extra-config", "--served-model-name")


def planned(
    make: Callable[[Checkpoint], Plan],
    checkpoint: Checkpoint,
    model: str,
    environ: Mapping[str, str],
    *,
    always: bool = False,
    answers: dict[str, acceptance.Answer] | None = None,
) -> tuple[Plan, acceptance.Answer | None]:
    """The plan that ``make`` gives and the engine's answer to it, None where it was not asked: it is where ``always``
    says so, and where the checkpoint is not known well enough and an engine is installed. Then the plan is made again
    with the sizes of the answer. ``model``: directory or hub id; ``answers``: those given before, by layout, which
    grow. Raises Stop as `acceptance.ask`."""
    plan = make(checkpoint)
    known = checkpoint.well_known or find_spec("sglang") is None
    if plan.device != "cuda" or not plan.gpus or (known and not (always and plan.feasible)):
        return plan, None
    layout = json.dumps(plan.parallel)
    answers = {} if answers is None else answers
    if layout not in answers:
        answers[layout] = acceptance.ask([_question(plan, model)], environ)[0]
    answer = answers[layout]
    sizes = engine_sizes.of(plan.parallel, answer.weights, answer.tokens, acceptance.BUDGETS)
    if sizes is None or checkpoint.well_known:
        return plan, answer
    return make(replace(checkpoint, engine=sizes)), answer


def _question(plan: Plan, model: str) -> acceptance.Question:
    return acceptance.Question(
        id=model,
        model=model,
        flags=acceptance.without(plan.flags, _READING),
        sm=min(int(gpu["sm"]) for gpu in plan.gpus),
        name=str(plan.gpus[0]["name"]),
        mem_mib=min(int(gpu["total_bytes"]) for gpu in plan.gpus) >> 20,
        gpus=len(plan.gpus),
    )
