"""Chooses what the pool can hold: the prefill step first, then requests, graphs and context."""

from __future__ import annotations

from dataclasses import replace

from . import kv, pipeline, solve
from .plan import Infeasibility
from .run import PlannerRun

CHUNKS = (4096, 2048, 1024)
TOKENS_PER_REQUEST = 4096
# A context that the planner cuts to the pool is cut to a multiple of this; below this many tokens a smaller prefill
# step is tried first.
CONTEXT_STEP, WORTHWHILE = 1024, 8192


def fit(run: PlannerRun, case: solve.MemoryCase) -> tuple[solve.MemoryCase, solve.MemoryResult]:
    """The case with the load that was chosen, and its account."""
    pinned = run.constraints.pinned
    wanted = case.load.context if "context_length" in pinned else min(case.load.context, WORTHWHILE)
    wanted = -(-wanted // case.page) * case.page
    result = solve.solve(case)
    if "chunked_prefill_size" not in pinned and not run.encoder and not (result.fits and result.tokens >= wanted):
        case, result = _smaller_step(run, case, result, wanted)
    if result.fits and result.tokens < wanted and "context_length" in pinned:
        result = replace(result, reasons=(_too_long(run, case, result, wanted),))
    case = _load(run, case, result)
    # Requests, graphs and context never raise the reserve, so the fraction stands.
    done = solve.solve(replace(case, fraction=result.fraction))
    done = replace(
        done,
        recommended=result.recommended,
        reasons=result.reasons,
        warnings=result.warnings,
        tokens=min(done.tokens, result.tokens) if result.tokens else 0,
    )
    return case, done


def _smaller_step(
    run: PlannerRun, case: solve.MemoryCase, result: solve.MemoryResult, wanted: int
) -> tuple[solve.MemoryCase, solve.MemoryResult]:
    """The largest prefill step with which ``wanted`` tokens fit, or the case as it was."""
    for chunk in CHUNKS[1:]:
        smaller = solve.with_chunk(case, chunk // case.parallel.dp)
        tried = solve.solve(smaller)
        if tried.fits and tried.tokens >= wanted:
            if not run.constraints.value("mem_fraction_static"):
                # No more than what is needed: else a card a little bigger, with the full step, had fewer.
                limit = min(wanted, case.token_limit) if case.token_limit else wanted
                smaller = replace(smaller, token_limit=limit)
            return smaller, solve.solve(smaller)
    return case, result


def _too_long(run: PlannerRun, case: solve.MemoryCase, result: solve.MemoryResult, wanted: int) -> Infeasibility:
    largest = max(0, result.tokens // CONTEXT_STEP * CONTEXT_STEP)
    remedies = tuple({"context_length": size} for size in (largest, min(largest, run.derived)) if size)
    return Infeasibility(
        f"CONTEXT_LENGTH={case.load.context} needs {wanted} KV tokens, the pool holds {result.tokens}", remedies
    )


def _load(run: PlannerRun, case: solve.MemoryCase, result: solve.MemoryResult) -> solve.MemoryCase:
    """The case with requests, graphs and context cut to what the pool holds."""
    load, pinned, tokens = case.load, run.constraints.pinned, result.tokens
    if tokens <= 0:
        return case
    if "context_length" not in pinned and tokens < load.context:
        load = replace(load, context=max(1, tokens // CONTEXT_STEP * CONTEXT_STEP or tokens))
    if "max_running_requests" not in pinned:
        load = replace(load, requests=_requests(result, load.requests))
    if "cuda_graph_max_bs" not in pinned and load.graph_bs:
        decoding = pipeline.microbatch(run.constraints, load.requests * case.parallel.dp, case.parallel)
        load = replace(load, graph_bs=min(load.graph_bs, decoding))
    return replace(case, load=load)


def _requests(result: solve.MemoryResult, most: int) -> int:
    """A power of two with at least TOKENS_PER_REQUEST tokens each, and a state slot where layers keep state."""
    room = max(1, result.tokens // TOKENS_PER_REQUEST)
    if result.state_slots is not None:
        room = min(room, max(1, result.state_slots // kv.MAMBA_SLOTS))
    power = 1 << (room.bit_length() - 1)
    return max(1, min(most, power))
