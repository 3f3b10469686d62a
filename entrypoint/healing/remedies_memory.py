"""Rungs for GPU memory: from the numbers of the log and of the account, within bounds that earlier ends have set.

A rung answers with changes, or None when it does not apply or is used up. Every fraction that ran out of memory is an
upper bound, every one that left no pool a lower bound; a new one lies strictly between, so that two causes never push
the same setting to and fro.
"""

from __future__ import annotations

import math

from ..plan import Change
from ..units import GIB, format_bytes
from .remediation import Case

TOO_HIGH = ("oom_kv_alloc", "oom_graph_capture", "oom_prefill", "oom_runtime")
TOO_LOW = ("kv_pool_too_small",)
SMALLEST_STEP = 0.005
LOWERINGS = 4  # how often one boot's fraction is lowered before it is called impossible
LOWEST_GRAPH, LOWEST_CHUNK = 8, 1024

Changes = tuple[Change, ...] | None


def lower_fraction(case: Case) -> Changes:
    """Lower by what was missing: down to the account's own fraction first, if the one in force lies above it."""
    facts, now = case.facts, case.facts.mem_fraction_static
    if now is None or case.changed("mem_fraction_static", *TOO_HIGH) >= LOWERINGS:
        return None
    step = 0.02 * (1 + case.changed("mem_fraction_static", *TOO_HIGH))
    missing = _missing(case)
    if missing and facts.baseline_free_bytes:
        step = max(step, missing / facts.baseline_free_bytes + 0.01)
    wanted = now - step
    why = f"{format_bytes(missing)} were missing" if missing else "too little was left beside the pool"
    planned = facts.planned_fraction
    if planned is not None and now > planned + SMALLEST_STEP:
        wanted = min(planned, now - SMALLEST_STEP)
        why = f"the account needs {format_bytes(facts.reserve_bytes or 0)} beside weights and pool"
    low = max([_viable(case), *case.values_at("mem_fraction_static", now, TOO_LOW)])
    if wanted <= low:
        wanted = (now + low) / 2
    wanted = math.floor(wanted * 1000) / 1000
    if wanted <= low or now - wanted < SMALLEST_STEP:
        return None
    return (case.change("mem_fraction_static", wanted, why),)


def raise_fraction(case: Case) -> Changes:
    """Raise to the smallest viable fraction plus the KV of one full request, below every fraction that failed."""
    facts, now = case.facts, case.facts.mem_fraction_static
    if now is None:
        return None
    free, minimum = facts.baseline_free_bytes, case.number("minimum_fraction") or _viable(case) or now
    pool = _wanted_kv(case)
    wanted = max(minimum, now) + (pool / free + 0.002 if free and pool else 0.03)
    failed = case.values_at("mem_fraction_static", now, TOO_HIGH)
    high = min([*failed, _ceiling(case)])
    if wanted >= high:
        wanted = high if not failed else max(minimum, now) + (high - max(minimum, now)) / 2
    wanted = math.floor(wanted * 1000) / 1000
    if wanted <= max(now, minimum) + SMALLEST_STEP / 2 or (failed and wanted >= min(failed)):
        return None
    why = f"the smallest viable fraction is {minimum:.3f}; the pool shall hold one full request"
    return (case.change("mem_fraction_static", wanted, why),)


def shorten_context(case: Case) -> Changes:
    """A context that fits, when the full one does not: never the operator's own."""
    facts = case.facts
    fraction, free = facts.mem_fraction_static, facts.baseline_free_bytes
    if not (fraction and free and facts.kv_bytes_per_token and facts.context_length):
        return None
    if "context_length" in facts.user_set:
        return None
    room = _ceiling(case) * free - (facts.weights_bytes or 0)
    tokens = int(room / facts.kv_bytes_per_token) // 1024 * 1024
    if tokens < 2048 or tokens >= facts.context_length or case.changed("context_length"):
        return None
    changes = [case.change("context_length", tokens, f"{format_bytes(room)} are left for the pool")]
    ceiling = math.floor(_ceiling(case) * 1000) / 1000
    if ceiling > fraction + SMALLEST_STEP:
        changes.append(case.change("mem_fraction_static", ceiling, "all that the account leaves for weights and pool"))
    return tuple(changes)


def shrink_graphs_once(case: Case) -> Changes:
    """Half the graph batch: only when graphs are what is too large."""
    if case.changed("cuda_graph_max_bs", "oom_graph_capture", "graph_capture_failed"):
        return None
    return None if _graphs_cannot_help(case) else shrink_graphs(case)


def shrink_graphs(case: Case) -> Changes:
    """Half the graph batch, down to 8 requests."""
    now = case.facts.cuda_graph_max_bs
    if now is None or now <= LOWEST_GRAPH:
        return None
    after = max(LOWEST_GRAPH, now // 2)
    return (case.change("cuda_graph_max_bs", after, "fewer and smaller CUDA graphs"),)


def graphs_off(case: Case) -> Changes:
    if case.facts.cuda_graph_max_bs == 0:
        return None
    return (case.change("cuda_graph_max_bs", 0, "no CUDA graphs: slower, but it starts"),)


def prefill_graphs_off(case: Case) -> Changes:
    """When the prefill runner's capture is what failed."""
    flag = "--disable-prefill-cuda-graph"
    if "prefill" not in case.text().lower() or flag in case.facts.flags or case.changed(flag):
        return None
    return (case.change(flag, True, "the capture of prefill graphs failed", before=False),)


def halve_chunk(case: Case) -> Changes:
    """Half the prefill chunk, a multiple of the page, not below 1024 tokens; alternates with the fraction."""
    facts, now = case.facts, case.facts.chunked_prefill_size
    halved = case.changed("chunked_prefill_size", "oom_prefill")
    lowered = case.changed("mem_fraction_static", "oom_prefill")
    if now is None or now <= LOWEST_CHUNK or halved > lowered:
        return None
    after = max(LOWEST_CHUNK, now // 2 // facts.page_size * facts.page_size)
    return (case.change("chunked_prefill_size", after, "smaller prefill chunks need less memory at a time"),)


def halve_chunk_again(case: Case) -> Changes:
    """The same when the fraction can be lowered no further."""
    facts, now = case.facts, case.facts.chunked_prefill_size
    if now is None or now <= LOWEST_CHUNK:
        return None
    after = max(LOWEST_CHUNK, now // 2 // facts.page_size * facts.page_size)
    return (case.change("chunked_prefill_size", after, "smaller prefill chunks need less memory at a time"),)


def autotune_off(case: Case) -> Changes:
    flag = "--disable-flashinfer-autotune"
    if flag in case.facts.flags or case.changed(flag) or case.facts.device != "cuda":
        return None
    return (case.change(flag, True, "FlashInfer's tuning run is left out", before=False),)


def fewer_requests(case: Case) -> Changes:
    now = case.facts.max_running_requests
    if now is None or now <= 1 or case.changed("max_running_requests") >= 3:
        return None
    return (case.change("max_running_requests", max(1, now // 2), "fewer requests at a time need less memory"),)


def _missing(case: Case) -> float:
    """Bytes by which the failed allocation exceeded what was free, 0 when the log does not say."""
    tried, free = case.number("tried_bytes"), case.number("free_bytes")
    if tried is None:
        return 0.0
    return max(tried - (free or 0.0), 0.0) + 0.25 * GIB


def _viable(case: Case) -> float:
    """The fraction that weights alone need; 0 when unknown."""
    free = case.number("baseline_free") or case.facts.baseline_free_bytes
    weights = case.number("weights") or case.facts.weights_bytes
    return weights / free if free and weights else 0.0


def _ceiling(case: Case) -> float:
    """The account's own fraction, when it has one; else what leaves a little beside."""
    planned = case.facts.planned_fraction
    return planned if planned is not None else 0.97


def _wanted_kv(case: Case) -> float:
    needed = case.number("needed_kv_bytes")
    if needed:
        return needed
    facts = case.facts
    return float((facts.context_length or 0) * (facts.kv_bytes_per_token or 0))


def _graphs_cannot_help(case: Case) -> bool:
    """Whether what stayed free beside the pool would not do even without any graph."""
    free, reserve = case.number("free_after_pool"), case.facts.reserve_bytes
    return free is not None and reserve is not None and reserve - case.facts.graph_bytes > free
