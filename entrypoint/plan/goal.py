"""What a plan is made for: one policy per value of `RELAUNCH_GOAL`. Pure: a table, and the arithmetic around it.

Measured on one H200 beside the engine alone (docs/measured.md, "Goals"): requests up to the captured graphs, the
engine's own prefill step and one decode step between prefill steps served 25% more tokens than the engine's defaults
with 256 clients, and a first token after 0.85 instead of 4.8 seconds; 4% more KV bought at half the prefill step cost
17%.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..checkpoint.geometry import Geometry

Name = Literal["balanced", "latency", "throughput", "context"]


@dataclass(frozen=True)
class Goal:
    """One policy.

    ``purpose``: what it is for, as `relaunch plan` says it; ``typical``: tokens of a request, prompt and answer
    together, that the number of requests is counted with; ``requests``: the most that decode at once; ``steps``: the
    prefill steps that are tried, in multiples of the engine's own, the best for this goal first; ``protect``: decode
    steps go between prefill steps once this share of the requests runs, 0 from the first one; ``draft``: whether
    ``SPECULATIVE=auto`` drafts; ``spread``: whether two replicas on half the cards each serve it better than one on
    all, where no fast link joins them."""

    name: Name
    purpose: str
    typical: int
    requests: int
    steps: tuple[float, ...]
    protect: float
    draft: bool
    spread: bool


_SMALLER = (1.0, 0.5, 0.25)
GOALS: dict[str, Goal] = {
    goal.name: goal
    for goal in (
        Goal(
            "balanced",
            "many clients at once: answers per second, a first token soon and steady streams",
            typical=2048,
            requests=256,
            steps=_SMALLER,
            protect=1 / 8,
            draft=True,
            spread=True,
        ),
        Goal(
            "latency",
            "few clients: each answer soon and steady, though the box computes fewer of them",
            typical=2048,
            requests=256,
            steps=_SMALLER,
            protect=0.0,
            draft=True,
            spread=False,
        ),
        # Twice the step computed long prompts 5% faster on H200 (21,025 against 19,991 tokens/s); streams wait longer.
        Goal(
            "throughput",
            "batch work: tokens per second over all requests, whatever a single one waits",
            typical=2048,
            requests=512,
            steps=(2.0, *_SMALLER),
            protect=1 / 4,
            draft=False,
            spread=True,
        ),
        Goal(
            "context",
            "long prompts: the most KV tokens, at smaller prefill steps",
            typical=4096,
            requests=256,
            steps=(0.5, 0.25, 0.125),
            protect=1 / 8,
            draft=False,
            spread=False,
        ),
    )
}
# Sparse attention on SM120: a full list of graphs hung for minutes and dominates the boot. Any model there: the capture
# ran out of memory at 512.
MOST_SPARSE_SM120, MOST_SM120 = 64, 256
# arg_groups/speculative_hook.py: the engine's own limit when none is given.
MOST_DRAFTING = 48
SMALLEST_STEP, LARGEST_STEP = 1024, 16384
# A pool that carries this many typical requests is not short of KV: prefill keeps its step.
ENOUGH = 16
# Where no step reaches that, one that keeps this share of the largest pool is preferred to a smaller one.
NEARLY_ALL = 0.9
# model_overrides/qwen3_vl.py: the engine brings a measured interval of its own on Hopper.
_OWN_INTERVAL = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")


def most_requests(goal: Goal, g: Geometry, *, sm120: bool, draft: bool, graphs: int) -> int:
    """The most requests that decode at once. ``graphs``: the largest batch that the engine itself would capture on
    this card; above 256, graphs are only captured as far as it goes."""
    most = min(goal.requests, max(256, graphs))
    if sm120:
        most = min(most, MOST_SPARSE_SM120 if g.dsa else MOST_SM120)
    return min(most, MOST_DRAFTING) if draft else most


def steps(goal: Goal, own: int) -> tuple[int, ...]:
    """Prefill steps in tokens, the best for ``goal`` first. ``own``: the engine's on this card."""
    sizes = (int(own * share) for share in goal.steps)
    return tuple(dict.fromkeys(max(SMALLEST_STEP, min(size, max(own, LARGEST_STEP))) for size in sizes))


def wanted(goal: Goal, context: int, step: int, own: int, most: int) -> int:
    """KV tokens with which ``step`` is taken without trying a smaller one: a context that is needed, and enough
    requests; above the engine's own step all ``most`` of them, since the step is paid for in KV."""
    count = most if step > own else ENOUGH
    return min(context, goal.typical * count) if step <= own else goal.typical * count


def interval(goal: Goal, g: Geometry, requests: int) -> tuple[int, int] | None:
    """(decode steps between two prefill steps, least running requests for it); None: the engine's own choice.

    The engine computes waiting prompts before it decodes: without this, one long prompt stops every stream until it
    is done (managers/scheduler.py:_should_defer_prefill). Below the least number prefill goes first, so that the
    batch fills."""
    if g.architecture in _OWN_INTERVAL:
        return None
    return 1, max(1, int(requests * goal.protect))
