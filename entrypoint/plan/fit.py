"""Chooses prefill step, requests, graphs and context together, for the goal of the plan (`goal.py`)."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

from . import goal as goals
from . import kv, memory, pipeline, solve
from .memory import Load
from .plan import Infeasibility
from .run import PlannerRun

# A context that the planner cuts to the pool is cut to a multiple of this.
CONTEXT_STEP = 1024
# Requests that the choice may end at.
_REQUESTS = (*range(1, 8), *range(8, 16, 2), *range(16, 32, 4), *range(32, 64, 8), *range(64, 128, 16))
_REQUESTS += (*range(128, 256, 32), *range(256, 513, 64))


@dataclass(frozen=True)
class Fit:
    """What was chosen. ``own_step``: the engine's prefill step on this card, of one rank; ``own``: what that step would
    have held, where a smaller or larger one was taken."""

    case: solve.MemoryCase
    result: solve.MemoryResult
    own_step: int
    own: solve.MemoryResult | None = None


@dataclass(frozen=True)
class _Choice:
    """What is free to choose. ``most``: requests of one attention group; ``steps``: prefill tokens of one rank."""

    run: PlannerRun
    goal: goals.Goal
    most: int
    own_step: int
    steps: tuple[int, ...]

    def is_free(self, name: str) -> bool:
        return name not in self.run.constraints.pinned

    def wanted(self, case: solve.MemoryCase, step: int) -> int:
        """KV tokens with which ``step`` is good enough, in whole pages."""
        pinned = not self.is_free("context_length")
        tokens = (
            case.load.context if pinned else goals.wanted(self.goal, case.load.context, step, self.own_step, self.most)
        )
        limit = case.token_limit
        tokens = min(tokens, limit) if limit else tokens
        return -(-tokens // case.page) * case.page

    def load(self, case: solve.MemoryCase, step: int, requests: int) -> Load:
        """The case's load with another step and as many requests, as far as they are free."""
        load = replace(case.load, chunk=step)
        if self.is_free("max_running_requests"):
            load = replace(load, requests=requests)
        if self.is_free("cuda_graph_max_bs") and load.graph_bs:
            total = load.requests * case.parallel.dp
            decoding = pipeline.microbatch(self.run.constraints, total, case.parallel)
            load = replace(load, graph_bs=min(case.load.graph_bs, decoding))
        return load


def fit(run: PlannerRun, case: solve.MemoryCase) -> Fit:
    """The load that suits the goal best of those that fit, and its account. ``case`` has the largest load that the
    choice may end at."""
    choice = _choice(run, case)
    if case.fraction is not None:
        return _at_given_fraction(choice, case)
    tried = [_with_step(choice, case, step) for step in choice.steps]
    start = case
    case, result = _best(choice, tried)
    other = case.load.chunk != choice.own_step and choice.is_free("chunked_prefill_size") and not run.encoder
    own = _with_step(choice, start, choice.own_step)[1] if other else None
    if result.fits and not choice.is_free("context_length") and result.tokens < case.load.context:
        result = replace(result, reasons=(_too_long(run, case, result),))
    case = replace(case, load=_context(choice, case.load, result))
    # The context never raises the reserve, so the fraction stands.
    done = solve.solve(replace(case, fraction=result.fraction))
    done = replace(
        done,
        recommended=result.recommended,
        reasons=result.reasons,
        warnings=result.warnings,
        tokens=min(done.tokens, result.tokens) if result.tokens else 0,
    )
    return Fit(case, done, choice.own_step, own)


def _choice(run: PlannerRun, case: solve.MemoryCase) -> _Choice:
    total = min(gpu.total_bytes for gpu in case.gpus)
    own, _ = memory.engine_steps(case.parallel, total)
    steps = tuple(step // case.parallel.dp for step in goals.steps(run.goal, own))
    if run.encoder or "chunked_prefill_size" in run.constraints.pinned:
        steps = (case.load.chunk,)
    return _Choice(run, run.goal, case.load.requests, own // case.parallel.dp, steps)


def _best(
    choice: _Choice, tried: list[tuple[solve.MemoryCase, solve.MemoryResult]]
) -> tuple[solve.MemoryCase, solve.MemoryResult]:
    """The first step with enough tokens, else the first that holds nearly as many as any."""
    for case, result in tried:
        if result.fits and result.tokens >= choice.wanted(case, case.load.chunk):
            return case, result
    fitting = [(case, result) for case, result in tried if result.fits]
    if not fitting:
        # The reasons of the smallest step say what is really short.
        return tried[-1]
    most = max(result.tokens for _, result in fitting)
    # A context that was asked for is worth any step.
    least = most * goals.NEARLY_ALL if choice.is_free("context_length") else most
    return next((case, result) for case, result in fitting if result.tokens >= least)


def _with_step(choice: _Choice, case: solve.MemoryCase, step: int) -> tuple[solve.MemoryCase, solve.MemoryResult]:
    """The most requests that the pool beside them carries. More requests leave a smaller pool, so that the counts that
    it carries are the first of the list."""

    def at(requests: int) -> tuple[solve.MemoryCase, solve.MemoryResult]:
        tried = solve.with_load(case, choice.load(case, step, requests))
        return tried, solve.solve(tried)

    counts = sorted({min(count, choice.most) for count in _REQUESTS} | {choice.most})
    counts = [count for count in counts if count <= choice.most]
    if not (choice.is_free("max_running_requests") or choice.is_free("cuda_graph_max_bs")) or len(counts) == 1:
        return at(choice.most)
    if not choice.is_free("max_running_requests"):
        return at(choice.most)
    few = bisect_right(counts, False, key=lambda count: _room(choice, at(count)[1]) < count)
    return at(counts[max(0, few - 1)])


def _room(choice: _Choice, result: solve.MemoryResult) -> int:
    """Typical requests that a pool carries, each with a state slot where layers keep state."""
    if not result.fits:
        return 0
    room = result.tokens // choice.goal.typical
    return room if result.state_slots is None else min(room, result.state_slots // kv.MAMBA_SLOTS)


def _at_given_fraction(choice: _Choice, case: solve.MemoryCase) -> Fit:
    """The fraction decides the pool; the prefill step gives way only where what is left cannot carry it."""
    first, done = _loaded(choice, case, choice.steps[0])
    chosen = first
    for step in choice.steps[1:] if not done.fits else ():
        smaller, tried = _loaded(choice, case, step)
        if tried.fits:
            dp = case.parallel.dp
            said = (
                f"MEM_FRACTION_STATIC={case.fraction:g} leaves room for a prefill step of {step * dp} tokens, not "
                f"{first.load.chunk * dp}"
            )
            chosen, done = smaller, replace(tried, warnings=(*tried.warnings, said))
            break
    if done.fits and not choice.is_free("context_length") and done.tokens < chosen.load.context:
        done = replace(done, reasons=(_too_long(choice.run, chosen, done),))
    return Fit(chosen, done, choice.own_step)


def _loaded(choice: _Choice, case: solve.MemoryCase, step: int) -> tuple[solve.MemoryCase, solve.MemoryResult]:
    pool = solve.solve(solve.with_load(case, choice.load(case, step, choice.most)))
    requests = choice.most
    if pool.tokens > 0:
        carried = replace(pool, reasons=())
        requests = max([1, *(count for count in _REQUESTS if count <= min(choice.most, _room(choice, carried)))])
    load = _context(choice, choice.load(case, step, requests), pool)
    case = solve.with_load(case, load)
    return case, solve.solve(case)


def _too_long(run: PlannerRun, case: solve.MemoryCase, result: solve.MemoryResult) -> Infeasibility:
    largest = max(0, result.tokens // CONTEXT_STEP * CONTEXT_STEP)
    remedies = tuple({"context_length": size} for size in (largest, min(largest, run.derived)) if size)
    wanted = -(-case.load.context // case.page) * case.page
    return Infeasibility(
        f"CONTEXT_LENGTH={case.load.context} needs {wanted} KV tokens, the pool holds {result.tokens}", remedies
    )


def _context(choice: _Choice, load: Load, result: solve.MemoryResult) -> Load:
    """The load with a context that the pool holds."""
    tokens = result.tokens
    if tokens <= 0 or not choice.is_free("context_length") or tokens >= load.context:
        return load
    return replace(load, context=max(1, tokens // CONTEXT_STEP * CONTEXT_STEP or tokens))
