"""The plan for GPUs: layout, kernels, then the largest safe fraction and what the KV pool can hold.

What a person set is kept and the rest is chosen around it; when nothing fits, the smallest change that would is
named. Every automatic choice is monotone: a bigger card or a smaller margin never plans fewer tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..checkpoint import geometry
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.geometry import Geometry
from ..checkpoint.quantization import method
from ..host.inventory import Inventory
from ..units import format_bytes
from . import backends, decide_memory, kernel_limits, kv, layout, memory, nodes, pipeline, solve
from . import warnings as cautions
from .alternatives import alternatives
from .backends import Kernels
from .command import Command
from .constraints import Constraints
from .context import ENCODERS, derived_context, is_embedding
from .decisions import Choices, model_document, parallel_document, refusal_for_context
from .infeasibility import PLAN_ELSEWHERE, Problem
from .memory import Load
from .plan import Learned, Plan
from .sharding import Parallel

CHUNKS = (4096, 2048, 1024)
# An unchunked prefill may carry --max-prefill-tokens at once.
UNCHUNKED = 16384
TOKENS_PER_REQUEST = 4096
# An operator's own, by this name or the older PYTORCH_CUDA_ALLOC_CONF, wins.
ALLOCATOR = "PYTORCH_ALLOC_CONF"
MAX_REQUESTS = 256
# On SM120 a full list of graphs hung for minutes, ran out of memory at 512, and dominates the boot.
MAX_REQUESTS_SM120 = 64
DRAFT_TOKENS, DRAFT_STEPS = 4, 3
DRAFT_REQUESTS = 48  # speculative_hook.py: the engine's own limit when none is given


def make(
    constraints: Constraints, inventory: Inventory, checkpoint: Checkpoint, learned: Learned | None
) -> tuple[Plan, list[Problem]]:
    """A plan for the inventory's GPUs, and why it cannot be. Never raises for a model that it does not know."""
    g = geometry.of(checkpoint.config, checkpoint.architecture)
    choices = Choices(constraints)
    warnings = [*constraints.notes, *cautions.unaccounted(constraints)]
    choices.take("device", "cuda", "the box has GPUs")
    parallel, reasons = layout.choose(choices, inventory, g)
    gpus = layout.used(inventory, parallel)
    sm = min((gpu.sm for gpu in gpus), default=0)
    derived = derived_context(checkpoint.config)
    readings, note = _valid(learned, parallel, inventory)
    if note:
        warnings.append(note)
    kernels = backends.resolve(choices, checkpoint, g, parallel, sm, inventory.nvlink)
    embedding = is_embedding(checkpoint, constraints.engine_arg("is_embedding"))
    draft = choices.take("speculative", "off", "no draft was asked for", source="default") == "mtp"
    choices.take(
        "memory_margin", constraints.settings.memory_margin, "kept free on top of the account", source="default"
    )
    case = _case(
        choices, constraints, checkpoint, g, parallel, gpus, sm, inventory.nvlink, kernels, derived, draft, readings
    )
    reasons += [
        r
        for r in (
            refusal_for_context(constraints, case.load.context, derived),
            *kernels.reasons,
            *kernel_limits.refusals(constraints, g, sm),
            cautions.old(gpus),
            cautions.pages(case, int(constraints.value("chunked_prefill_size", 0))),
            cautions.draft(draft, checkpoint, g),
        )
        if r
    ]
    if not gpus:
        return _plan(
            constraints,
            checkpoint,
            choices,
            kernels,
            case,
            None,
            reasons or [Problem(f"the box has no GPU ({PLAN_ELSEWHERE})", ({"device": "cpu"},))],
            warnings,
            embedding,
            derived,
        )
    case, result = _fit(choices, constraints, case, derived)
    shares = [memory.allocator_share(gpu, parallel, inventory.nvlink, case.margin) for gpu in gpus]
    env = {ALLOCATOR: f"per_process_memory_fraction:{min(shares)}"}
    choices.note(ALLOCATOR, env[ALLOCATOR], "torch's cache stays out of the margin and of what others will still take")
    decide_memory.tell(choices, constraints, case, result, CHUNKS[0])
    warnings += [
        *kernel_limits.cautions(constraints, g, sm),
        *cautions.mixed(gpus),
        *cautions.page(constraints, case.page),
    ]
    warnings += cautions.boxes(constraints, case, len(inventory.gpus))
    warnings += [*kernels.warnings, *result.warnings, *cautions.cautions(checkpoint, g, result, constraints, case)]
    reasons += result.reasons
    planned, reasons = _plan(
        constraints, checkpoint, choices, kernels, case, result, reasons, warnings, embedding, derived
    )
    return replace(planned, env={**env, **planned.env}), reasons


def _valid(learned: Learned | None, parallel: Parallel, inventory: Inventory) -> tuple[dict[str, float], str | None]:
    """Readings of an earlier boot count only for the same layout and while the box is no fuller than then."""
    if learned is None or not learned.readings:
        return {}, None
    readings = dict(learned.readings)
    for name in ("tp", "pp", "ep", "dp"):
        if name in readings and int(readings[name]) != getattr(parallel, name):
            return {}, f"readings of an earlier boot with {name.upper()}={int(readings[name])} are not used"
    free = min((gpu.free_bytes for gpu in inventory.gpus), default=0)
    if learned.free_at_start_bytes is not None and free < learned.free_at_start_bytes:
        return {}, (
            f"readings of an earlier boot are not used: {format_bytes(free)} are free on the fullest GPU, "
            f"{format_bytes(learned.free_at_start_bytes)} were then"
        )
    if parallel.pp > 1:
        # Stages weigh differently, and the reading does not say whose it is.
        readings = {name: value for name, value in readings.items() if not name.endswith("weights")}
    return readings, None


def _case(
    choices: Choices,
    constraints: Constraints,
    checkpoint: Checkpoint,
    g: Geometry,
    parallel: Parallel,
    gpus: tuple[Any, ...],
    sm: int,
    nvlink: bool,
    kernels: Kernels,
    derived: int,
    draft: bool,
    readings: dict[str, float],
) -> solve.Case:
    """The case before chunk and fraction are chosen. The reserve is for the largest automatic choice, so that
    a bigger pool never needs a bigger reserve."""
    encoder = checkpoint.architecture in ENCODERS
    most = MAX_REQUESTS_SM120 if 120 <= sm < 130 else MAX_REQUESTS
    most = min(most, DRAFT_REQUESTS) if draft else most
    requests = int(constraints.value("max_running_requests", most * parallel.pp))
    graphs = int(
        constraints.value("cuda_graph_max_bs", min(pipeline.microbatch(constraints, requests, parallel), most))
    )
    if constraints.engine_arg("disable_cuda_graph") or constraints.engine_arg("disable_decode_cuda_graph"):
        graphs = 0
    off = constraints.engine_arg("disable_cuda_graph") or constraints.engine_arg("disable_prefill_cuda_graph")
    backend = constraints.engine_arg("cuda_graph_backend_prefill") or kernels.flags.get("--cuda-graph-backend-prefill")
    chunk = int(constraints.value("chunked_prefill_size", -1 if encoder else CHUNKS[0]))
    step = (chunk if chunk > 0 else UNCHUNKED) // parallel.dp
    context = int(constraints.value("context_length", derived))
    load = Load(
        step,
        graphs,
        max(1, requests // parallel.dp),
        context,
        # A pipeline captures none unless it is told to (cuda_graph_hook.py:apply_cuda_graph_compatibility).
        not off and backend != "disabled" and not encoder and (parallel.pp == 1 or bool(backend)),
        DRAFT_TOKENS if draft else 0,
    )
    dsa = [
        constraints.engine_arg(f"dsa_{side}_backend") or kernels.flags.get(f"--dsa-{side}-backend")
        for side in ("prefill", "decode")
    ]
    page = int(_float(constraints.engine_arg("page_size"), 1))
    attention = "dsa" if g.dsa else str(choices.value("attention_backend"))
    ratios = {
        name: _float(constraints.engine_arg(name), default)
        for name, default in (("swa_full_tokens_ratio", kv.SWA_RATIO), ("mamba_full_memory_ratio", kv.MAMBA_RATIO))
    }
    slots = constraints.engine_arg("max_mamba_cache_size")
    return solve.Case(
        checkpoint,
        g,
        parallel,
        gpus,
        nvlink,
        sm,
        str(choices.value("kv_cache_dtype")),
        "trtllm" in dsa or dsa == ["tilelang", "tilelang"],
        kernel_limits.page_size(attention, page),
        not (encoder or constraints.engine_arg("disable_radix_cache")),
        load,
        load,
        int(choices.value("memory_margin")),
        solve.shares(checkpoint, g, parallel, sm, draft=draft),
        fraction=constraints.value("mem_fraction_static"),
        token_limit=constraints.value("max_total_tokens"),
        requests_given=constraints.value("max_running_requests"),
        swa_ratio=ratios["swa_full_tokens_ratio"],
        mamba_ratio=ratios["mamba_full_memory_ratio"],
        mamba_slots=int(_float(slots, 0)) or None,
        readings=readings,
    )


def _float(value: Any, default: float) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return default


def _fit(choices: Choices, constraints: Constraints, case: solve.Case, derived: int) -> tuple[solve.Case, solve.Result]:
    """Chunk, then what the pool can hold: requests, graphs, context."""
    wanted = min(case.load.context, 8192) if "context_length" not in constraints.fixed else case.load.context
    wanted = -(-wanted // case.page) * case.page
    result = solve.solve(case)
    free_chunk = "chunked_prefill_size" not in constraints.fixed and case.checkpoint.architecture not in ENCODERS
    if free_chunk and not (result.fits and result.tokens >= wanted):
        for chunk in CHUNKS[1:]:
            smaller = solve.with_chunk(case, chunk // case.parallel.dp)
            tried = solve.solve(smaller)
            if tried.fits and tried.tokens >= wanted:
                # No more than what the wish needs: else a card a little bigger, with the full chunk, had fewer.
                limit = min(wanted, case.token_limit) if case.token_limit else wanted
                case = smaller if constraints.value("mem_fraction_static") else replace(smaller, token_limit=limit)
                result = solve.solve(case)
                break
    tokens = result.tokens
    if result.fits and tokens < wanted and "context_length" in constraints.fixed:
        largest = max(0, tokens // 1024 * 1024)
        fixes = tuple({"context_length": size} for size in (largest, min(largest, derived)) if size)
        short = f"CONTEXT_LENGTH={case.load.context} needs {wanted} KV tokens, the pool holds {tokens}"
        result = replace(result, reasons=(Problem(short, fixes),))
    load = case.load
    if tokens > 0:
        if "context_length" not in constraints.fixed and tokens < load.context:
            load = replace(load, context=max(1, tokens // 1024 * 1024 or tokens))
        if "max_running_requests" not in constraints.fixed:
            load = replace(load, requests=_requests(case, result, load.requests))
        if "cuda_graph_max_bs" not in constraints.fixed and load.graph_bs:
            decoding = pipeline.microbatch(constraints, load.requests * case.parallel.dp, case.parallel)
            load = replace(load, graph_bs=min(load.graph_bs, decoding))
    final = replace(case, load=load, fraction=result.fraction if case.fraction is None else case.fraction)
    done = solve.solve(final)
    done = replace(
        done,
        recommended=result.recommended,
        reasons=result.reasons,
        warnings=result.warnings,
        tokens=min(done.tokens, tokens) if tokens else 0,
    )
    return replace(final, fraction=case.fraction), done


def _requests(case: solve.Case, result: solve.Result, most: int) -> int:
    """A power of two with at least TOKENS_PER_REQUEST tokens each, and a state slot where layers keep state."""
    room = max(1, result.tokens // TOKENS_PER_REQUEST)
    if result.state_slots is not None:
        room = min(room, max(1, result.state_slots // kv.MAMBA_SLOTS))
    power = 1 << (room.bit_length() - 1)
    return max(1, min(most, power))


def _plan(
    constraints: Constraints,
    checkpoint: Checkpoint,
    choices: Choices,
    kernels: Kernels,
    case: solve.Case,
    result: solve.Result | None,
    reasons: list[Problem],
    warnings: list[str],
    embedding: bool,
    derived: int,
) -> tuple[Plan, list[Problem]]:
    """Values, flags and account as the plan document has them."""
    load = case.load
    tokens = result.tokens if result and result.tokens > 0 else None
    fraction = constraints.value(
        "mem_fraction_static", result.fraction if result and tokens and result.fraction > 0 else None
    )
    chunk = constraints.value(
        "chunked_prefill_size", load.chunk * case.parallel.dp if case.checkpoint.architecture not in ENCODERS else -1
    )
    requests = constraints.value("max_running_requests", load.requests * case.parallel.dp)
    values = {
        "context_length": load.context,
        "max_running_requests": requests,
        "chunked_prefill_size": chunk,
        "cuda_graph_max_bs": constraints.value("cuda_graph_max_bs", load.graph_bs),
    }
    command = Command()
    if embedding:
        command.set("--is-embedding")
    for name, option in (("tp", "--tp-size"), ("pp", "--pp-size"), ("ep", "--ep-size"), ("dp", "--attn-dp-size")):
        size = getattr(case.parallel, name)
        command.set(option, size if size > 1 or name == "tp" else None)
    for option, value in kernels.flags.items():
        command.set(option, value)
    kv_dtype = choices.value("kv_cache_dtype")
    command.set("--kv-cache-dtype", kv_dtype if kv_dtype != "auto" else None)
    command.set(
        "--context-length",
        values["context_length"]
        if values["context_length"] != derived or "context_length" in constraints.fixed
        else None,
    )
    command.set("--max-running-requests", requests)
    command.set("--chunked-prefill-size", chunk)
    if checkpoint.architecture in ENCODERS:
        command.set("--disable-radix-cache")
    if values["cuda_graph_max_bs"]:
        command.set("--cuda-graph-max-bs-decode", values["cuda_graph_max_bs"])
    else:
        command.set("--cuda-graph-backend-decode", "disabled")
    command.set("--mem-fraction-static", fraction)
    command.set("--max-total-tokens", case.token_limit)
    if case.draft:
        for option, value in (
            ("algorithm", "NEXTN"),
            ("num-steps", DRAFT_STEPS),
            ("eagle-topk", 1),
            ("num-draft-tokens", DRAFT_TOKENS),
        ):
            command.set(f"--speculative-{option}", value)
    command.set("--enable-metrics")
    # The supervisor asks every few seconds; the engine's access log is for clients.
    command.set("--uvicorn-access-log-exclude-prefixes", "/metrics")
    choices.note("--enable-metrics", True, "the supervisor reads token progress from /metrics")
    command.merge(constraints.flags, constraints.given)
    feasible = not reasons
    planned = Plan(
        feasible=feasible,
        reasons=tuple(problem.text for problem in reasons),
        model=model_document(checkpoint, str(choices.value("quantization") or method(checkpoint.quantization))),
        gpus=tuple(
            {"index": x.index, "name": x.name, "sm": x.sm, "total_bytes": x.total_bytes, "free_bytes": x.free_bytes}
            for x in case.gpus[: case.parallel.per_node]
        ),
        parallel=parallel_document(choices, constraints),
        device="cuda",
        kv_bytes_per_token=int(result.cell) if result else None,
        per_gpu=result.accounts if result else (),
        mem_fraction_static=fraction,
        max_total_tokens=tokens,
        context_length=values["context_length"],
        max_running_requests=requests,
        chunked_prefill_size=chunk,
        cuda_graph_max_bs=values["cuda_graph_max_bs"],
        kv_cache_dtype=kv_dtype,
        attention_backend=choices.value("attention_backend"),
        moe_runner_backend=choices.value("moe_runner_backend"),
        fp4_gemm_backend=choices.value("fp4_gemm_backend"),
        is_embedding=embedding,
        flags=command.words(),
        env=dict(constraints.env),
        decisions=choices.decisions(),
        warnings=tuple(dict.fromkeys(warnings)),
        nodes=nodes.document(case, result) if result else (),
        network=nodes.network(case.g, case.parallel, load),
        alternatives=alternatives(kernels.facts),
    )
    return planned, reasons
