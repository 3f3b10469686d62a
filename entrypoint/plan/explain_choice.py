"""Why each memory setting is what it is, what it costs, and the smallest change that would fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..hardware import Inventory
from ..units import MIB, format_bytes
from . import layout, memory, solve
from .parts import Choices
from .wish import Wishes


def tell(choices: Choices, wishes: Wishes, case: solve.Case, result: solve.Result, usual_chunk: int) -> None:
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
    choices.take("max_running_requests", requests, f"{result.tokens // max(1, case.load.requests)} KV tokens each "
                                                   f"when all run; "
                 f"its table takes {format_bytes(memory.request_table(case.load))}")  # fmt: skip
    choices.take("cuda_graph_max_bs", case.load.graph_bs, f"every running request decodes from a graph; "
                 f"{memory.decode_sizes(case.load.graph_bs)} sizes are captured")  # fmt: skip
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


def smallest_change(case: solve.Case, result: solve.Result, wishes: Wishes, inventory: Inventory) -> tuple[str, ...]:
    """The first settings, one at a time, with which the same case would fit."""
    found = []
    for text, other in _alternatives(case, wishes, inventory):
        tried = solve.solve(other)
        wanted = min(other.load.context, 8192) if "context_length" not in wishes.fixed else other.load.context
        if tried.fits and tried.tokens >= wanted:
            found.append(text)
        # A second way out is worth saying, a second larger TP is not.
        if len(found) == 2 or (text.startswith("TP=") and found):
            break
    return (f"{'; or '.join(found)} would fit",) if found else ()


def _alternatives(case: solve.Case, wishes: Wishes, inventory: Inventory) -> Iterator[tuple[str, solve.Case]]:
    if case.load.chunk > 1024 and "chunked_prefill_size" in wishes.fixed:
        for chunk in (4096, 2048, 1024):
            if chunk < case.load.chunk:
                yield f"CHUNKED_PREFILL_SIZE={chunk}", solve.with_chunk(case, chunk)
    if not case.kv_dtype.startswith("fp8") and case.sm >= 89 and not case.g.sliding_layers:
        yield "KV_CACHE_DTYPE=fp8_e4m3", replace(case, kv_dtype="fp8_e4m3")
    if case.fraction is not None:
        yield "MEM_FRACTION_STATIC=auto", replace(case, fraction=None)
    if case.margin > MIB * 256:
        yield "MEMORY_MARGIN=256MiB", replace(case, margin=MIB * 256)
    for tp in range(case.parallel.tp + 1, 65):
        if layout.divides(case.g, tp) and tp % case.parallel.tp == 0:
            gpus = tuple(case.gpus[0] for _ in range(tp * case.parallel.pp))
            here = "" if tp * case.parallel.pp <= len(inventory.gpus) else f" on {tp * case.parallel.pp} GPUs"
            parallel = replace(case.parallel, tp=tp)
            shares = solve.shares(case.checkpoint, case.g, parallel, case.sm, draft=case.draft)
            yield f"TP={tp}{here}", replace(case, parallel=parallel, gpus=gpus, shares=shares)
