"""Chooses what the pool can hold: the prefill step first, then requests, graphs and context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from . import kv, pipeline, solve
from .plan import Infeasibility
from .run import PlannerRun

CHUNKS = (4096, 2048, 1024)
TOKENS_PER_REQUEST = 4096
# A context that the planner cuts to the pool is cut to a multiple of this.
CONTEXT_STEP = 1024
# A pool of fewer tokens serves a few short requests at most: smaller loads are tried first, and it is said.
WORTHWHILE = 8192
# Requests at once where memory is so short that the engine's own rule of thumb leaves no pool.
FEW_REQUESTS = 4


def fit(run: PlannerRun, case: solve.MemoryCase) -> tuple[solve.MemoryCase, solve.MemoryResult]:
    """The case with the load that was chosen, and its account."""
    if case.fraction is not None:
        return _at_given_fraction(run, case)
    wanted = wanted_tokens(run, case)
    result = solve.solve(case)
    if not (result.fits and result.tokens >= wanted):
        case, result = _smaller_load(run, case, result, wanted)
    if result.fits and result.tokens < wanted and "context_length" in run.constraints.pinned:
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


def wanted_tokens(run: PlannerRun, case: solve.MemoryCase) -> int:
    """Tokens below which a pool is of little use: the context that was asked for, else a few short requests."""
    asked = case.load.context if "context_length" in run.constraints.pinned else min(case.load.context, WORTHWHILE)
    return -(-asked // case.page) * case.page


def _at_given_fraction(run: PlannerRun, case: solve.MemoryCase) -> tuple[solve.MemoryCase, solve.MemoryResult]:
    """The fraction decides the pool; the prefill step gives way only where what is left cannot carry it."""
    wanted = wanted_tokens(run, case)
    first, done = _loaded(run, case)
    chosen = first
    for chunk in _free_chunks(run, case)[1:] if not done.fits else ():
        smaller, tried = _loaded(run, solve.with_chunk(case, chunk // case.parallel.dp))
        if tried.fits:
            said = (
                f"MEM_FRACTION_STATIC={case.fraction:g} leaves room for a prefill step of {chunk} tokens, not "
                f"{first.load.chunk * case.parallel.dp}"
            )
            chosen, done = smaller, replace(tried, warnings=(*tried.warnings, said))
            break
    if done.fits and done.tokens < wanted and "context_length" in run.constraints.pinned:
        done = replace(done, reasons=(_too_long(run, chosen, done, wanted),))
    return chosen, done


def _loaded(run: PlannerRun, case: solve.MemoryCase) -> tuple[solve.MemoryCase, solve.MemoryResult]:
    case = _load(run, case, solve.solve(case))
    return case, solve.solve(case)


def _free_chunks(run: PlannerRun, case: solve.MemoryCase) -> tuple[int, ...]:
    """Prefill steps that may be chosen, the largest first; the asked one alone where there is one."""
    if run.encoder or "chunked_prefill_size" in run.constraints.pinned:
        return (case.load.chunk * case.parallel.dp,)
    return CHUNKS


def _smaller_load(
    run: PlannerRun, case: solve.MemoryCase, result: solve.MemoryResult, wanted: int
) -> tuple[solve.MemoryCase, solve.MemoryResult]:
    """The largest load with which ``wanted`` tokens fit, else the one that leaves most tokens."""
    best = (case, result)
    tried = solve.solve(case)
    for smaller in _smaller(run, case):
        tried = solve.solve(smaller)
        if tried.fits and tried.tokens >= wanted:
            # No more than what is needed: else a card a little bigger, with the full step, had fewer.
            limit = min(wanted, case.token_limit) if case.token_limit else wanted
            smaller = replace(smaller, token_limit=limit)
            return smaller, solve.solve(smaller)
        if tried.fits > best[1].fits or (tried.fits and tried.tokens > best[1].tokens):
            best = (smaller, tried)
    # Nothing fits: the reasons of the smallest load say what is really short.
    return best if best[1].fits else (best[0], replace(best[1], reasons=tried.reasons))


def _smaller(run: PlannerRun, case: solve.MemoryCase) -> Iterator[solve.MemoryCase]:
    """Smaller prefill steps; then a few requests with no more set aside than the account asks for."""
    pinned, dp = run.constraints.pinned, case.parallel.dp
    chunks = _free_chunks(run, case)
    for chunk in chunks[1:]:
        yield solve.with_chunk(case, chunk // dp)
    load = case.load
    if "max_running_requests" not in pinned:
        load = replace(load, requests=min(load.requests, FEW_REQUESTS))
    if "cuda_graph_max_bs" not in pinned:
        decoding = pipeline.microbatch(run.constraints, load.requests * dp, case.parallel)
        load = replace(load, graph_bs=min(load.graph_bs, decoding))
    few = replace(case, load=load, reserve=load, rule_of_thumb=False)
    for chunk in chunks:
        yield solve.with_chunk(few, chunk // dp)


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
