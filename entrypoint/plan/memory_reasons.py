"""Why each memory setting is what it is, and what it costs: text alone, decided elsewhere (`gpu.py`, `fit.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..units import format_bytes
from . import memory, nodes, pipeline, solve
from .decision_log import DecisionLog
from .fit import Fit
from .run import PlannerRun


def reasons(run: PlannerRun, fitted: Fit, decided: Mapping[str, Any]) -> dict[str, str]:
    """The reason of each setting in ``decided``, with what it costs and gains."""
    case, result = fitted.case, fitted.result
    total = min(gpu.total_bytes for gpu in case.gpus)
    slack = min(result.pre) * (1 - result.fraction)
    default = memory.engine_default(case.g, case.parallel, total)
    gain = f" ({result.tokens / result.default_tokens:.2f}x)" if result.default_tokens else ""
    context, requests = decided["context_length"], decided["max_running_requests"]
    part = pipeline.microbatch(run.constraints, requests, case.parallel)
    turns = f"; each stage decodes {part} of them at a time" if case.parallel.pp > 1 else ""
    texts = {
        "mem_fraction_static": f"leaves {format_bytes(slack)} for graphs, activations, workspaces and the margin; the "
        f"engine's own {default} would hold {result.default_tokens} tokens, this holds {result.tokens}{gain}",
        "chunked_prefill_size": _step(fitted),
        "context_length": "what the model allows and the pool holds: "
        f"{result.tokens // context if context else 0} requests of that length at once",
        "max_running_requests": f"as many as decode from graphs and as the pool carries at {run.goal.typical} tokens "
        f"each; more wait their turn. {result.tokens // max(1, case.load.requests)} KV tokens each when all run; their "
        f"table takes {format_bytes(memory.request_table(case.load))}{turns}",
        "cuda_graph_max_bs": _graphs(case, part),
        "max_total_tokens": "what was asked for and no more",
    }
    return {name: texts[name] for name in decided}


def _graphs(case: solve.MemoryCase, requests: int) -> str:
    """``requests``: the largest decode batch of all attention groups together."""
    batch = max(1, requests // case.parallel.dp)
    if not case.load.graph_bs:
        return "no graphs: every step is launched kernel by kernel"
    sizes = f"{memory.decode_sizes(case.load.graph_bs)} sizes are captured"
    if batch <= case.load.graph_bs:
        return f"every running request decodes from a graph; {sizes}"
    return f"batches above {case.load.graph_bs} of the {batch} requests decode without a graph; {sizes}"


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


def _step(fitted: Fit) -> str:
    """What the prefill step costs and gains beside the engine's own."""
    case, result, own = fitted.case, fitted.result, fitted.own
    step, usual = (size * case.parallel.dp for size in (case.load.chunk, fitted.own_step))
    if step == usual:
        return "the engine's own step on this card: long prompts keep its speed; its activations stand in the account"
    if own is None:
        return f"one prefill step, the engine's own is {usual} here; its activations stand in the account"
    equal = f", {own.tokens / own.default_tokens:.2f}x the engine's own at equal chunk" if own.default_tokens else ""
    if not own.fits or not result.tokens:
        return f"the engine's own step of {usual} does not fit beside the pool{equal}"
    change = 100 * (1 - own.tokens / result.tokens)
    if step < usual:
        return (
            f"costs long prompts {usual / step:.0f} times as many prefill steps as {usual}, which would hold "
            f"{own.tokens} KV tokens ({change:.1f}% fewer{equal})"
        )
    return (
        f"long prompts are computed in steps of twice the engine's {usual} (5% faster on H200); streams wait "
        f"longer for each, and the pool holds {result.tokens} instead of {own.tokens} tokens"
    )
