"""Sizes that the installed engine gave for one layout, for models that the planner does not know well enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EngineSizes:
    """What the engine's own classes and pools say of one layout (``tp``, ``pp``, ``ep``, ``dp``): ``weights``, bytes of
    rank 0's parameters as built; ``cell``, bytes of the pools a token; ``fixed``, bytes that they take before the
    first one."""

    tp: int
    pp: int
    ep: int
    dp: int
    weights: int
    cell: float
    fixed: float = 0.0

    def describe(self, tp: int, pp: int, ep: int, dp: int) -> bool:
        """Whether they are of this layout. A rank says nothing of other pipeline stages."""
        return (self.tp, self.pp, self.ep, self.dp) == (tp, 1, ep, dp) and pp == 1


def of(
    layout: Mapping[str, Any], weights: int | None, tokens: tuple[int, ...], budgets: tuple[int, int]
) -> EngineSizes | None:
    """The sizes behind an answer: ``tokens`` that the engine's pools hold in each of ``budgets`` bytes. None where the
    answer has no weights or no two numbers of tokens. ``layout``: a plan's ``parallel``."""
    if not weights or len(tokens) != len(budgets) or tokens[1] <= tokens[0]:
        return None
    cell = (budgets[1] - budgets[0]) / (tokens[1] - tokens[0])
    return EngineSizes(
        tp=int(layout["tp"]),
        pp=int(layout["pp"]),
        ep=int(layout["ep"]),
        dp=int(layout["dp_attention"]),
        weights=weights,
        cell=cell,
        fixed=max(0.0, budgets[0] - tokens[0] * cell),
    )
