"""Why each memory setting is what it is, and what it costs: text alone, decided elsewhere (`gpu.py`, `fit.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..units import format_bytes
from . import memory, nodes, pipeline, solve
from .constraints import Constraints
from .decision_log import DecisionLog

# The prefill step that the plan's is compared with: the engine's own on cards of 60 to 160 GiB (memory_hook.py).
USUAL_CHUNK = 8192


def reasons(
    constraints: Constraints, case: solve.MemoryCase, result: solve.MemoryResult, decided: Mapping[str, Any]
) -> dict[str, str]:
    """The reason of each setting in ``decided``, with its numbers."""
    total = min(gpu.total_bytes for gpu in case.gpus)
    slack = min(result.pre) * (1 - result.fraction)
    default = memory.engine_default(case.g, case.parallel, total)
    gain = f" ({result.tokens / result.default_tokens:.2f}x)" if result.default_tokens else ""
    context, requests = decided["context_length"], decided["max_running_requests"]
    part = pipeline.microbatch(constraints, requests, case.parallel)
    turns = f"; each stage decodes {part} of them at a time" if case.parallel.pp > 1 else ""
    texts = {
        "mem_fraction_static": f"leaves {format_bytes(slack)} for graphs, activations, workspaces and the margin; the "
        f"engine's own {default} would hold {result.default_tokens} tokens, this holds {result.tokens}{gain}",
        "chunked_prefill_size": _chunk_cost(case, result),
        "context_length": "what the model allows and the pool holds: "
        f"{result.tokens // context if context else 0} requests of that length at once",
        "max_running_requests": f"{result.tokens // max(1, case.load.requests)} KV tokens each when all run; its table "
        f"takes {format_bytes(memory.request_table(case.load))}{turns}",
        "cuda_graph_max_bs": "every running request decodes from a graph; "
        f"{memory.decode_sizes(case.load.graph_bs)} sizes are captured",
        "max_total_tokens": "what was asked for and no more, with a prefill step cut for it",
    }
    return {name: texts[name] for name in decided}


def explain_stages(log: DecisionLog, case: solve.MemoryCase) -> None:
    """What each pipeline stage holds and what crosses between them."""
    parallel, layers = case.parallel, case.g.layers
    if parallel.partition:
        log.record(
            pipeline.PARTITION,
            ",".join(map(str, parallel.partition)),
            "layers of each stage, set in the engine's environment",
            source="environment",
        )
    elif layers % parallel.pp:
        held = ", ".join(str(len(parallel.layers(layers, stage))) for stage in range(parallel.pp))
        log.append_reason("pp", f"{layers} layers as {held}: the pool is what the fullest stage can hold")
    crossing = nodes.network(case.g, parallel, case.load)
    pipe = crossing["pipeline"] if crossing else None
    if crossing is None or pipe is None:
        return
    log.append_reason(
        "pp",
        f"from box to box {nodes.size(pipe['bytes_per_prefill_step'])} for {crossing['prefill_tokens']} tokens of "
        f"prefill, {nodes.size(pipe['bytes_per_decode_step'])} for a decode step of {crossing['decode_tokens']}",
    )


def _chunk_cost(case: solve.MemoryCase, result: solve.MemoryResult) -> str:
    """What another prefill step would cost in KV tokens, at the fraction that each allows."""
    bigger = USUAL_CHUNK // case.parallel.dp
    if case.load.chunk >= bigger or case.fraction is not None:
        return "one prefill step; its activations stand in the account"
    other = solve.solve(replace(solve.with_chunk(case, bigger), token_limit=None))
    if not result.tokens or not result.default_tokens:
        return f"a step of {USUAL_CHUNK} would leave {other.tokens} KV tokens"
    lost = 100 * (1 - other.tokens / result.tokens)
    equal = f"{other.tokens / result.default_tokens:.2f}x the engine's own"
    return (
        f"costs long prompts twice as many prefill steps as {USUAL_CHUNK}, which would hold {other.tokens} KV tokens "
        f"({lost:.1f}% fewer, {equal} at equal chunk)"
    )
