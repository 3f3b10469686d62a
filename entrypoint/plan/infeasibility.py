"""Why a plan cannot be, and the changes that may help; `advice.py` tries them before it names any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Keys of a fix that are no settings: which GPUs the engine may see, and how many like the first there would be.
VISIBLE = "CUDA_VISIBLE_DEVICES"
GPUS = "GPUS"


@dataclass(frozen=True)
class Problem:
    """``text`` names what cannot be, without advice. ``fixes``, best first: a planner's name or an engine flag
    (``--dsa-decode-backend``) and its value; None leaves it to the planner."""

    text: str
    fixes: tuple[Mapping[str, Any], ...] = ()
