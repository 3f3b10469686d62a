"""Why a plan cannot be, and the changes that may help; `advice.py` tries them before it names any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config.settings import Settings

# Keys of a fix that are no settings: which GPUs the engine may see, and how many like the first there would be.
VISIBLE = "CUDA_VISIBLE_DEVICES"
GPUS = "GPUS"

# The way out of a refusal for want of GPUs, in every verb.
PLAN_ELSEWHERE = (
    "to plan for a box that has them, run `relaunch hardware --json > box.json` there and set "
    "RELAUNCH_GPU_INVENTORY=box.json here"
)


def asks_for_gpus(settings: Settings) -> str | None:
    """What in the settings cannot do without GPUs; None where the model may run on the CPU."""
    if settings.device == "cuda":
        return "RELAUNCH_DEVICE=cuda"
    # A model of the operator's own may well run on the CPU; presets say DEVICE=cpu when they do.
    return f"preset {settings.preset}" if settings.preset and settings.device != "cpu" else None


@dataclass(frozen=True)
class Problem:
    """``text`` names what cannot be, without advice. ``fixes``, best first: a planner's name or an engine flag
    (``--dsa-decode-backend``) and its value; None leaves it to the planner."""

    text: str
    fixes: tuple[Mapping[str, Any], ...] = ()
