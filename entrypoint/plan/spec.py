"""The settings that the planner decides, one record each; what other modules need to know of them derives from here.

Bounds are what the engine or the arithmetic here can take. They hold for ENGINE_ARGS too, which no setting's own check
sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from ..config.engine_flags import Flag, table

_LARGEST = 2**31 - 1
_RANKS = (1, 4096)


@dataclass(frozen=True)
class PlanSetting:
    """One planned setting.

    ``name``: of the planner, and of the `RELAUNCH_` setting in lower case; ``option``: the engine flag that carries it,
    None for one that becomes several flags or none; ``kind``: how its value is read; ``bounds``: smallest and largest
    number; ``give_up``: place in the order in which advice gives settings up, the one that costs least first, 0 for
    those that are given up only together with all others, None for those that are never given up; ``free``: the value
    that leaves the choice to the planner; ``offer``: the largest number that advice names, more has no use; ``shown``:
    place among the values that are printed.
    """

    name: str
    option: str | None
    kind: Literal["whole", "share", "word"] = "whole"
    bounds: tuple[int, int] | None = None
    give_up: int | None = None
    free: Any = None
    offer: int | None = None
    shown: int | None = None

    @property
    def flag(self) -> Flag | None:
        """The engine's own record of ``option``."""
        return table()[self.option] if self.option else None


SETTINGS = (
    PlanSetting("device", "--device", "word"),
    PlanSetting("tp", "--tp-size", bounds=_RANKS, give_up=0),
    PlanSetting("pp", "--pp-size", bounds=_RANKS, give_up=0, free=1),
    PlanSetting("ep", "--ep-size", bounds=_RANKS, give_up=0, free=1),
    PlanSetting("dp_attention", "--attn-dp-size", bounds=_RANKS, give_up=0, free=1),
    PlanSetting("quantization", "--quantization", "word"),
    PlanSetting("speculative", None, "word", give_up=0, free="off"),
    PlanSetting("mem_fraction_static", "--mem-fraction-static", "share", give_up=4, shown=1),
    PlanSetting("max_total_tokens", "--max-total-tokens", bounds=(1, _LARGEST), give_up=7, shown=2),
    PlanSetting("context_length", "--context-length", bounds=(1, _LARGEST), give_up=5, offer=1 << 20, shown=3),
    PlanSetting("max_running_requests", "--max-running-requests", bounds=(1, _LARGEST), give_up=1, offer=4096, shown=4),
    PlanSetting(
        "chunked_prefill_size", "--chunked-prefill-size", bounds=(-1, _LARGEST), give_up=3, offer=16384, shown=5
    ),
    PlanSetting("cuda_graph_max_bs", "--cuda-graph-max-bs-decode", bounds=(0, _LARGEST), give_up=2, offer=512, shown=6),
    PlanSetting("kv_cache_dtype", "--kv-cache-dtype", "word", give_up=6, shown=7),
    PlanSetting("attention_backend", "--attention-backend", "word", give_up=0, shown=8),
    PlanSetting("moe_runner_backend", "--moe-runner-backend", "word", give_up=0, shown=9),
    PlanSetting("fp4_gemm_backend", "--fp4-gemm-backend", "word", give_up=0, shown=10),
    PlanSetting("memory_margin", None, bounds=(0, 1 << 50)),
)
BY_NAME = {setting.name: setting for setting in SETTINGS}


def _ranked(place: str) -> tuple[str, ...]:
    ranked = [setting for setting in SETTINGS if getattr(setting, place) is not None]
    return tuple(setting.name for setting in sorted(ranked, key=lambda setting: int(getattr(setting, place))))


# What is printed of a plan, in order.
SHOWN = _ranked("shown")
# What advice may give up at all, and of these what takes memory, the one that costs least first.
GIVEN_UP = _ranked("give_up")
MEMORY = tuple(name for name in GIVEN_UP if BY_NAME[name].give_up)


@cache
def by_dest() -> dict[str, PlanSetting]:
    """The settings by the argparse dest of the engine flag that carries them."""
    return {setting.flag.dest: setting for setting in SETTINGS if setting.flag}
