"""Which arm is tried next, and whether the best one is kept. Pure: the journal's measurements in, a decision out.

Every step is measured once by itself; the worse half is dropped, and the better half is put together, the best first,
as long as that helps. At the end the best and the untuned plan are measured again, in turn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from .arms import UNTUNED, Arm

# Measurements of each side at the end: two must be, and up to four while the time lasts.
LEAST_PAIRS, MOST_PAIRS = 2, 4
# A gain below this share is not worth a setting that differs from the planner's.
LEAST_GAIN = 0.01


@dataclass(frozen=True)
class Measured:
    """What ``arm`` came to. ``score``: higher is better, None when it was dropped for ``why``."""

    arm: Arm
    score: float | None
    why: str | None = None


def next_arm(steps: Sequence[Arm], results: Mapping[str, Measured]) -> Arm | None:
    """Return the arm to try next, None when the search is over. ``results``: by the arm's name, the untuned plan's
    among them."""
    if UNTUNED.name not in results:
        return UNTUNED
    base = results[UNTUNED.name].score
    if base is None:
        return None
    for arm in steps:
        if arm.name not in results:
            return arm
    better = sorted((arm for arm in steps if _score(results, arm) > base), key=lambda arm: -_score(results, arm))
    kept = better[: max(1, math.ceil(len(steps) / 2))]
    together = kept[0] if kept else UNTUNED
    for arm in kept[1:]:
        merged = together.with_(arm)
        if merged is None:
            continue
        if merged.name not in results:
            return merged
        if _score(results, merged) > _score(results, together):
            together = merged
    return None


def best(results: Mapping[str, Measured]) -> Arm | None:
    """Return the best arm, None when none is better than the untuned plan."""
    arms = [found.arm for found in results.values() if found.score is not None]
    arm = max(arms, key=lambda arm: _score(results, arm), default=UNTUNED)
    return None if arm == UNTUNED else arm


def verdict(untuned: Sequence[float], tuned: Sequence[float]) -> dict[str, Any]:
    """Return ``kept`` and ``gain`` (a share), with the ``spread`` of either side and why. Kept is what was better in
    every one of its measurements than the untuned plan in any of its own, and by LEAST_GAIN in the mean."""
    gain = mean(tuned) / mean(untuned) - 1
    spread = max((max(side) - min(side)) / mean(side) for side in (untuned, tuned))
    apart = min(tuned) > max(untuned)
    if not apart:
        why = "the gain is within the noise"
    elif gain < LEAST_GAIN:
        why = f"the gain is below {LEAST_GAIN:.0%}"
    else:
        why = "better in every measurement"
    return {"kept": apart and gain >= LEAST_GAIN, "gain": round(gain, 4), "spread": round(spread, 4), "why": why}


def score(levels: Sequence[Mapping[str, Any]], figure: str) -> float:
    """Return the geometric mean of ``figure`` over the levels."""
    return math.exp(mean(math.log(max(float(level[figure]), 1e-9)) for level in levels))


def _score(results: Mapping[str, Measured], arm: Arm) -> float:
    found = results[arm.name].score
    return -math.inf if found is None else found
