"""Settings, checkpoint and inventory in; a plan out. Pure: no clock, no file, no process."""

from __future__ import annotations

import json
from dataclasses import replace

from ..checkpoint.geometry import lacks
from ..checkpoint.model import Checkpoint
from ..config.settings import Loaded
from ..errors import config_rejected
from ..host.inventory import Inventory
from . import advice, cpu, gpu, nodes
from .constraints import Constraints, gather
from .plan import Change, Infeasibility, Learned, Plan
from .run import PlannerRun


def make(
    loaded: Loaded,
    inventory: Inventory,
    checkpoint: Checkpoint,
    *,
    learned: Learned | None = None,
    changes: tuple[Change, ...] = (),
) -> Plan:
    """The plan for ``checkpoint`` on ``inventory``. ``changes`` are what healing changed in this boot.

    Raises Stop (78) for settings that make no sense; a plan that cannot fit is returned with ``feasible``
    False, its reasons, and the smallest change that would fit.
    """
    plan, problems = _once(loaded, inventory, checkpoint, learned, changes)
    if learned is not None and learned.tuned and not plan.feasible:
        untuned = make(loaded, inventory, checkpoint, learned=replace(learned, tuned=()), changes=changes)
        warning = f"tuned settings are not used, with them: {problems[0].text if problems else plan.reasons[0]}"
        return replace(untuned, warnings=(*untuned.warnings, warning))
    if plan.feasible and loaded.settings.nnodes > 1:
        return replace(plan, one_box=nodes.one_box(plan, _alone(plan, loaded, inventory, checkpoint)))
    if plan.feasible:
        return plan

    def retry(other: Loaded, box: Inventory) -> Plan:
        return _once(other, box, checkpoint, learned, changes)[0]

    return replace(plan, reasons=advice.Advisor(plan, loaded, inventory, retry).reasons(problems))


def _alone(plan: Plan, loaded: Loaded, inventory: Inventory, checkpoint: Checkpoint) -> Plan:
    """The plan that the same settings give on one of the nodes, laid out anew."""

    def fresh(other: Loaded, box: Inventory) -> Plan:
        return _once(other, box, checkpoint, None, ())[0]

    alone = advice.Advisor(plan, loaded, inventory, fresh).planned({"nnodes": 1, "node_rank": 0, "tp": None, "pp": 1})
    assert alone is not None
    return alone


def _once(
    loaded: Loaded,
    inventory: Inventory,
    checkpoint: Checkpoint,
    learned: Learned | None,
    changes: tuple[Change, ...],
) -> tuple[Plan, list[Infeasibility]]:
    """A plan without advice, and why it cannot be."""
    constraints = gather(loaded, learned, changes)
    checkpoint = _overridden(constraints, checkpoint)
    run = PlannerRun(constraints, inventory, checkpoint, learned)
    device = constraints.value("device", "cuda" if inventory.gpus else "cpu")
    if device == "cpu":
        return cpu.make(run)
    return gpu.make(run)


def _overridden(constraints: Constraints, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as --json-model-override-args makes the engine see it."""
    text = constraints.engine_arg("json_model_override_args")
    if not isinstance(text, str) or not text.strip():
        return checkpoint
    try:
        override = json.loads(text)
    except (ValueError, RecursionError):
        override = None
    if not isinstance(override, dict):
        raise config_rejected(
            f"RELAUNCH_ENGINE_ARGS: --json-model-override-args {text!r} is not a JSON object",
            "write '{\"name\": value}'",
        )
    config = {**checkpoint.config, **override}
    lacking = lacks(config, checkpoint.architecture)
    if lacking:
        raise config_rejected(f"RELAUNCH_ENGINE_ARGS: --json-model-override-args leaves no usable {lacking}")
    return replace(checkpoint, config=config)
