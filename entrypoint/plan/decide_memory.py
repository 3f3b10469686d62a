"""Why each memory setting is what it is, and what it costs."""

from __future__ import annotations

from dataclasses import replace

from ..units import format_bytes
from . import memory, nodes, pipeline, solve
from .constraints import Constraints
from .decisions import Choices


def tell(choices: Choices, constraints: Constraints, case: solve.Case, result: solve.Result, usual_chunk: int) -> None:
    """One decision per memory setting, each with its numbers."""
    total = min(gpu.total_bytes for gpu in case.gpus)
    slack = min(result.pre) * (1 - result.fraction)
    default = memory.engine_default(case.g, case.parallel, total)
    gain = f" ({result.tokens / result.default_tokens:.2f}x)" if result.default_tokens else ""
    choices.take(
        "mem_fraction_static",
        result.fraction,
        f"leaves {format_bytes(slack)} for graphs, activations, workspaces and the margin; the engine's own {default} "
        f"would hold {result.default_tokens} tokens, this holds {result.tokens}{gain}",
    )
    chunk = case.load.chunk * case.parallel.dp
    choices.take("chunked_prefill_size", chunk, _chunk_cost(case, result, usual_chunk))
    context = case.load.context
    whole = result.tokens // context if context else 0
    choices.take(
        "context_length", context, f"what the model allows and the pool holds: {whole} requests of that length at once"
    )
    requests = case.load.requests * case.parallel.dp
    part = pipeline.microbatch(constraints, requests, case.parallel)
    turns = f"; each stage decodes {part} of them at a time" if case.parallel.pp > 1 else ""
    choices.take(
        "max_running_requests",
        requests,
        f"{result.tokens // max(1, case.load.requests)} KV tokens each "
        f"when all run; "
        f"its table takes {format_bytes(memory.request_table(case.load))}{turns}",
    )
    choices.take(
        "cuda_graph_max_bs",
        case.load.graph_bs,
        f"every running request decodes from a graph; {memory.decode_sizes(case.load.graph_bs)} sizes are captured",
    )
    _tell_stages(choices, case)
    if case.token_limit is not None:
        choices.take(
            "max_total_tokens", case.token_limit, "what was asked for and no more, with a prefill step cut for it"
        )
    if case.readings:
        choices.note(
            "readings",
            sorted(case.readings),
            "an earlier boot measured these; they replace the formulas",
            source="learned",
        )


def _tell_stages(choices: Choices, case: solve.Case) -> None:
    parallel, layers = case.parallel, case.g.layers
    if parallel.partition:
        choices.note(
            pipeline.PARTITION,
            ",".join(map(str, parallel.partition)),
            "layers of each stage, set in the engine's environment",
            source="environment",
        )
    elif layers % parallel.pp:
        held = ", ".join(str(len(parallel.layers(layers, stage))) for stage in range(parallel.pp))
        choices.explain("pp", f"{layers} layers as {held}: the pool is what the fullest stage can hold")
    crossing = nodes.network(case.g, parallel, case.load)
    pipe = crossing["pipeline"] if crossing else None
    if crossing is None or pipe is None:
        return
    choices.explain(
        "pp",
        f"from box to box {nodes.size(pipe['bytes_per_prefill_step'])} for {crossing['prefill_tokens']} tokens of "
        f"prefill, {nodes.size(pipe['bytes_per_decode_step'])} for a decode step of {crossing['decode_tokens']}",
    )


def _chunk_cost(case: solve.Case, result: solve.Result, usual: int) -> str:
    """What another prefill step would cost in KV tokens, at the fraction that each allows."""
    bigger = 8192 // case.parallel.dp
    if case.load.chunk >= bigger or case.fraction is not None:
        return "one prefill step; its activations stand in the account"
    other = solve.solve(replace(solve.with_chunk(case, bigger), token_limit=None))
    if not result.tokens or not result.default_tokens:
        return f"a step of {8192} would leave {other.tokens} KV tokens"
    lost = 100 * (1 - other.tokens / result.tokens)
    equal = f"{other.tokens / result.default_tokens:.2f}x the engine's own"
    return (
        f"costs long prompts twice as many prefill steps as {8192}, which would hold {other.tokens} KV tokens "
        f"({lost:.1f}% fewer, {equal} at equal chunk)"
    )
