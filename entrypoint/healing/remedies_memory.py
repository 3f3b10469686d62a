"""Remedies for GPU memory, computed from the numbers of the log and of the memory plan.

A remedy returns changes, or None when it does not apply or is used up. Every fraction that ran out of memory is an
upper bound, every one that left no pool a lower bound; a new one lies strictly between, so that two causes never push
the same setting to and fro.
"""

from __future__ import annotations

import math

from ..plan import Change
from ..units import GIB, format_bytes
from .remediation import RemediationContext

TOO_HIGH = ("oom_kv_alloc", "oom_graph_capture", "oom_prefill", "oom_runtime")
TOO_LOW = ("kv_pool_too_small",)
# Fractions of the GPU memory that is free before the engine starts (`--mem-fraction-static`).
SMALLEST_STEP = 0.005  # 0.5 GiB of a 96 GB card: less than one prefill chunk's activations, not worth a restart
LOWERING_STEP = 0.02  # the engine's own advice after an out-of-memory: lower by a few hundredths (docs of sglang)
LOWERING_MARGIN = 0.01  # beside what the failed allocation lacked: the next allocation of the same step
RAISING_MARGIN = 0.002  # rounding of the engine's figures, which have two decimals of GiB
RAISING_STEP = 0.03  # when neither the free memory nor the wanted pool is known
CEILING = 0.97  # without a plan: the CUDA context and NCCL's buffers need about 3% of a 48 to 96 GB card
ALLOCATOR_SLACK = 0.25 * GIB  # fragmentation: torch reserves in blocks of 2 to 20 MiB and keeps free ones
LOWERINGS = 4  # how often one boot's fraction is lowered before it is called impossible
LOWEST_GRAPH, LOWEST_CHUNK = 8, 1024
SHORTEST_CONTEXT = 2048  # tokens; below this a server is of no use
HALVINGS_OF_REQUESTS = 3
GRAPH_BACKEND = "--cuda-graph-backend-decode"

Changes = tuple[Change, ...] | None


def lower_fraction(context: RemediationContext) -> Changes:
    """Lower by what was missing: down to the account's own fraction first, if the one in force lies above it."""
    config, now = context.config, context.config.mem_fraction_static
    if now is None or context.changed("mem_fraction_static", *TOO_HIGH) >= LOWERINGS:
        return None
    step = LOWERING_STEP * (1 + context.changed("mem_fraction_static", *TOO_HIGH))
    missing = _missing(context)
    if missing and config.baseline_free_bytes:
        step = max(step, missing / config.baseline_free_bytes + LOWERING_MARGIN)
    wanted = now - step
    why = f"{format_bytes(missing)} were missing" if missing else "too little was left beside the pool"
    planned = config.planned_fraction
    if planned is not None and now > planned + SMALLEST_STEP:
        wanted = min(planned, now - SMALLEST_STEP)
        why = f"the account needs {format_bytes(config.reserve_bytes or 0)} beside weights and pool"
    low = max([_viable(context), *context.values_at("mem_fraction_static", now, TOO_LOW)])
    if wanted <= low:
        wanted = (now + low) / 2
    wanted = math.floor(wanted * 1000) / 1000
    if wanted <= low or now - wanted < SMALLEST_STEP:
        return None
    return (context.change("mem_fraction_static", wanted, why),)


def raise_fraction(context: RemediationContext) -> Changes:
    """Raise to the smallest viable fraction plus the KV of one full request, below every fraction that failed."""
    config, now = context.config, context.config.mem_fraction_static
    if now is None:
        return None
    free, minimum = config.baseline_free_bytes, context.number("minimum_fraction") or _viable(context) or now
    pool = _wanted_kv(context)
    wanted = max(minimum, now) + (pool / free + RAISING_MARGIN if free and pool else RAISING_STEP)
    failed = context.values_at("mem_fraction_static", now, TOO_HIGH)
    high = min([*failed, _ceiling(context)])
    if wanted >= high:
        wanted = high if not failed else max(minimum, now) + (high - max(minimum, now)) / 2
    wanted = math.floor(wanted * 1000) / 1000
    if wanted <= max(now, minimum) + SMALLEST_STEP / 2 or (failed and wanted >= min(failed)):
        return None
    why = f"the smallest viable fraction is {minimum:.3f}; the pool shall hold one full request"
    return (context.change("mem_fraction_static", wanted, why),)


def shorten_context(context: RemediationContext) -> Changes:
    """A context that fits, when the full one does not: never the operator's own."""
    config = context.config
    fraction, free = config.mem_fraction_static, config.baseline_free_bytes
    if not (fraction and free and config.kv_bytes_per_token and config.context_length):
        return None
    if "context_length" in config.user_set:
        return None
    room = _ceiling(context) * free - (config.weights_bytes or 0)
    tokens = int(room / config.kv_bytes_per_token) // 1024 * 1024
    if tokens < SHORTEST_CONTEXT or tokens >= config.context_length or context.changed("context_length"):
        return None
    changes = [context.change("context_length", tokens, f"{format_bytes(room)} are left for the pool")]
    ceiling = math.floor(_ceiling(context) * 1000) / 1000
    if ceiling > fraction + SMALLEST_STEP:
        changes.append(
            context.change("mem_fraction_static", ceiling, "all that the account leaves for weights and pool")
        )
    return tuple(changes)


def shrink_graphs_once(context: RemediationContext) -> Changes:
    """Half the graph batch: only when graphs are what is too large."""
    if context.changed("cuda_graph_max_bs", "oom_graph_capture", "graph_capture_failed"):
        return None
    return None if _graphs_cannot_help(context) else shrink_graphs(context)


def shrink_graphs(context: RemediationContext) -> Changes:
    """Half the graph batch, down to 8 requests."""
    now = context.config.cuda_graph_max_bs
    if now is None or now <= LOWEST_GRAPH:
        return None
    after = max(LOWEST_GRAPH, now // 2)
    return (context.change("cuda_graph_max_bs", after, "fewer and smaller CUDA graphs"),)


def breakable_graphs(context: RemediationContext) -> Changes:
    """Graphs in pieces, with what cannot be captured run between them (the capture of whole ones hung for 36 minutes on
    8x RTX PRO 6000, sglang#29580): most of the speed stays."""
    known = GRAPH_BACKEND in context.config.flags or context.changed(GRAPH_BACKEND)
    if not context.config.cuda_graph_max_bs or known:
        return None
    return (context.change(GRAPH_BACKEND, "breakable", "decode graphs are captured in pieces"),)


def graphs_off(context: RemediationContext) -> Changes:
    """No decode graphs at all."""
    if context.config.cuda_graph_max_bs == 0:
        return None
    off = context.change("cuda_graph_max_bs", 0, "no CUDA graphs: slower, but it starts")
    if not context.changed(GRAPH_BACKEND):
        return (off,)
    return (off, context.change(GRAPH_BACKEND, "disabled", "nor in pieces", before="breakable"))


def prefill_graphs_off(context: RemediationContext) -> Changes:
    """When the prefill runner's capture is what failed."""
    flag = "--disable-prefill-cuda-graph"
    if "prefill" not in context.text().lower() or flag in context.config.flags or context.changed(flag):
        return None
    return (context.change(flag, True, "the capture of prefill graphs failed", before=False),)


def halve_chunk(context: RemediationContext) -> Changes:
    """Half the prefill chunk, a multiple of the page, not below 1024 tokens; alternates with the fraction."""
    config, now = context.config, context.config.chunked_prefill_size
    halved = context.changed("chunked_prefill_size", "oom_prefill")
    lowered = context.changed("mem_fraction_static", "oom_prefill")
    if now is None or now <= LOWEST_CHUNK or halved > lowered:
        return None
    after = max(LOWEST_CHUNK, now // 2 // config.page_size * config.page_size)
    return (context.change("chunked_prefill_size", after, "smaller prefill chunks need less memory at a time"),)


def halve_chunk_again(context: RemediationContext) -> Changes:
    """The same when the fraction can be lowered no further."""
    config, now = context.config, context.config.chunked_prefill_size
    if now is None or now <= LOWEST_CHUNK:
        return None
    after = max(LOWEST_CHUNK, now // 2 // config.page_size * config.page_size)
    return (context.change("chunked_prefill_size", after, "smaller prefill chunks need less memory at a time"),)


def autotune_off(context: RemediationContext) -> Changes:
    """No tuning run of FlashInfer's kernels."""
    flag = "--disable-flashinfer-autotune"
    if flag in context.config.flags or context.changed(flag) or context.config.device != "cuda":
        return None
    return (context.change(flag, True, "FlashInfer's tuning run is left out", before=False),)


def fewer_requests(context: RemediationContext) -> Changes:
    """Half as many requests at a time."""
    now = context.config.max_running_requests
    if now is None or now <= 1 or context.changed("max_running_requests") >= HALVINGS_OF_REQUESTS:
        return None
    return (context.change("max_running_requests", max(1, now // 2), "fewer requests at a time need less memory"),)


def _missing(context: RemediationContext) -> float:
    """Bytes by which the failed allocation exceeded what was free, 0 when the log does not say."""
    tried, free = context.number("tried_bytes"), context.number("free_bytes")
    if tried is None:
        return 0.0
    return max(tried - (free or 0.0), 0.0) + ALLOCATOR_SLACK


def _viable(context: RemediationContext) -> float:
    """The fraction that weights alone need; 0 when unknown."""
    free = context.number("baseline_free") or context.config.baseline_free_bytes
    weights = context.number("weights") or context.config.weights_bytes
    return weights / free if free and weights else 0.0


def _ceiling(context: RemediationContext) -> float:
    """The account's own fraction, when it has one; else what leaves a little beside."""
    planned = context.config.planned_fraction
    return planned if planned is not None else CEILING


def _wanted_kv(context: RemediationContext) -> float:
    needed = context.number("needed_kv_bytes")
    if needed:
        return needed
    config = context.config
    return float((config.context_length or 0) * (config.kv_bytes_per_token or 0))


def _graphs_cannot_help(context: RemediationContext) -> bool:
    """Whether what stayed free beside the pool would not do even without any graph."""
    free, reserve = context.number("free_after_pool"), context.config.reserve_bytes
    return free is not None and reserve is not None and reserve - context.config.graph_bytes > free
