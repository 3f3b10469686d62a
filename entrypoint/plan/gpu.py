"""The plan for GPUs: layout, kernels, then the largest safe fraction and what the KV pool can hold.

What a person set is kept and the rest is chosen around it for the goal; when nothing fits, the smallest change that
would is named.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..checkpoint import geometry
from ..checkpoint.quantization import method
from ..host.inventory import PLAN_ELSEWHERE, Gpu, Inventory
from ..units import format_bytes
from . import (
    draft,
    host_kv,
    kernel_limits,
    kernels,
    kv,
    layout,
    memory,
    memory_reasons,
    nodes,
    pipeline,
    shapes,
    solve,
    warnings,
)
from . import goal as goals
from .alternatives import alternatives
from .constraints import Constraints
from .fit import Fit, fit
from .memory import Load
from .plan import Infeasibility, Learned, Plan
from .run import PlannerRun
from .sharding import Parallel

# An unchunked prefill may carry --max-prefill-tokens at once.
UNCHUNKED = 16384
# An operator's own, by this name or the older PYTORCH_CUDA_ALLOC_CONF, wins.
ALLOCATOR = "PYTORCH_ALLOC_CONF"


def make(run: PlannerRun) -> tuple[Plan, list[Infeasibility]]:
    """A plan for the inventory's GPUs, and why it cannot be. Never raises for a model that it does not know."""
    constraints, log, inventory = run.constraints, run.log, run.inventory
    g = geometry.of(run.checkpoint.config, run.checkpoint.architecture)
    if constraints.engine_arg("dtype") in ("float", "float32"):
        g = replace(g, itemsize=4)
    run.warnings += warnings.unaccounted(constraints)
    log.record("goal", run.goal.name, run.goal.purpose, source=run.constraints.sources["goal"])
    log.decide("device", "cuda", "the box has GPUs")
    parallel, problems = layout.choose(log, constraints, inventory, _shapes(run, g))
    run.refuse(*problems)
    gpus = layout.used(inventory, parallel)
    sm = min((gpu.sm for gpu in gpus), default=0)
    readings, note = _valid(run.learned, parallel, inventory)
    run.warnings += [note] if note else []
    chosen = kernels.resolve(
        log, constraints, kernels.context(run.checkpoint, g, parallel, sm, inventory, _dtype(constraints))
    )
    _decide_draft(run, g, parallel)
    log.decide("memory_margin", constraints.settings.memory_margin, "kept free on top of the account", source="default")
    case = _case(run, chosen, gpus, readings)
    run.refuse(
        run.context_problem(case.load.context),
        *chosen.reasons,
        *kernel_limits.refusals(constraints, g, sm),
        *kernel_limits.quantization(constraints, method(run.checkpoint.quantization), sm),
        warnings.too_old(gpus),
        warnings.unknown_class(run.checkpoint),
        warnings.uneven_pages(case, int(constraints.value("chunked_prefill_size", 0))),
        warnings.no_draft_layer(case.draft, run.checkpoint, g),
    )
    if not gpus:
        if not run.reasons:
            run.refuse(Infeasibility(f"the box has no GPU ({PLAN_ELSEWHERE})", ({"device": "cpu"},)))
        return _plan(run, chosen, case, None), run.reasons
    fitted = fit(run, case)
    case, result = fitted.case, fitted.result
    _decide_memory(run, fitted)
    _decide_interval(run, case)
    _say_replicas(run, case, result)
    run.warnings += [
        *kernel_limits.warnings(constraints, g, sm),
        *warnings.mixed(gpus),
        *warnings.page(constraints, case.page),
        *warnings.several_nodes(constraints, case, len(inventory.gpus)),
        *chosen.warnings,
        *result.warnings,
        *warnings.account(run, case, result),
    ]
    pools, problem = warnings.host_pools(run, case, result)
    pools += host_kv.decide(run, case, result)
    run.refuse(*result.reasons, problem)
    run.host = {"memory_bytes": inventory.host_memory_bytes or None, "pools_bytes": pools}
    return _plan(run, chosen, case, result), run.reasons


def _shapes(run: PlannerRun, g: geometry.Geometry) -> shapes.Shapes:
    """Whether NVFP4 experts are swizzled: on all kernels but TRT-LLM's, which are SM 100 alone, and Marlin's, which
    stand in below (layers/quantization/modelopt_quant.py)."""
    sm = min((gpu.sm for gpu in run.inventory.gpus), default=0)
    backend = str(run.constraints.value("moe_runner_backend", "auto"))
    other = backend == "marlin" or backend.startswith("flashinfer_trtllm") or (backend == "auto" and sm < 120)
    return shapes.of(run.checkpoint, g, swizzled=not other)


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
    run: PlannerRun, chosen: kernels.Kernels, gpus: tuple[Gpu, ...], readings: dict[str, float]
) -> solve.MemoryCase:
    """The case with the largest load that the choice may end at, before prefill step and fraction are chosen."""
    constraints, found = run.constraints, chosen.context
    drafts = run.log.value("speculative") == "mtp"
    load = _load(run, chosen, drafts, min((gpu.total_bytes for gpu in gpus), default=0))
    slots = constraints.engine_arg("max_mamba_cache_size")
    attention = "dsa" if found.g.dsa else str(run.log.value("attention_backend"))
    engine, parallel = run.checkpoint.engine, found.parallel
    if engine is not None and not engine.describe(parallel.tp, parallel.pp, parallel.ep, parallel.dp):
        engine = None
    return solve.MemoryCase(
        checkpoint=run.checkpoint,
        g=found.g,
        parallel=found.parallel,
        gpus=gpus,
        nvlink=found.nvlink,
        sm=found.sm,
        kv_dtype=str(run.log.value("kv_cache_dtype")),
        raw_mla=_raw_rows(run, chosen),
        page=kernel_limits.page_size(attention, int(_float(constraints.engine_arg("page_size"), 1))),
        radix=not (run.encoder or constraints.engine_arg("disable_radix_cache")),
        load=load,
        reserve=load,
        margin=int(run.log.value("memory_margin")),
        pcie_ipc=chosen.env.get(kernels.PCIE_IPC) == "1" or constraints.engine_env(kernels.PCIE_IPC) == "1",
        shares=solve.shares(run.checkpoint, found.g, found.parallel, found.sm, draft=drafts),
        fraction=constraints.value("mem_fraction_static"),
        token_limit=constraints.value("max_total_tokens"),
        requests_given=constraints.value("max_running_requests"),
        swa_ratio=_float(constraints.engine_arg("swa_full_tokens_ratio"), kv.SWA_RATIO),
        mamba_ratio=_float(constraints.engine_arg("mamba_full_memory_ratio"), kv.MAMBA_RATIO),
        mamba_slots=int(_float(slots, 0)) or None,
        readings=readings,
        engine=engine,
    )


def _load(run: PlannerRun, chosen: kernels.Kernels, drafts: bool, total: int) -> Load:
    """The largest load that the choice may end at, on cards of ``total`` bytes."""
    constraints, found = run.constraints, chosen.context
    parallel = found.parallel
    own_step, own_graphs = memory.engine_steps(parallel, total)
    most = goals.most_requests(run.goal, found.g, sm120=found.sm120, draft=drafts, graphs=own_graphs)
    requests = int(constraints.value("max_running_requests", most * parallel.pp))
    graphs = int(
        constraints.value("cuda_graph_max_bs", min(pipeline.microbatch(constraints, requests, parallel), most))
    )
    off = constraints.engine_arg("disable_cuda_graph")
    if off or constraints.engine_arg("disable_decode_cuda_graph"):
        graphs = 0
    backend = constraints.engine_arg("cuda_graph_backend_prefill") or chosen.flags.get("--cuda-graph-backend-prefill")
    chunk = int(constraints.value("chunked_prefill_size", -1 if run.encoder else goals.steps(run.goal, own_step)[0]))
    return Load(
        chunk=(chunk if chunk > 0 else UNCHUNKED) // parallel.dp,
        graph_bs=graphs,
        requests=max(1, requests // parallel.dp),
        context=int(constraints.value("context_length", run.derived)),
        # A pipeline captures none unless it is told to (cuda_graph_hook.py:apply_cuda_graph_compatibility).
        prefill_graph=not (off or constraints.engine_arg("disable_prefill_cuda_graph"))
        and backend != "disabled"
        and not run.encoder
        and (parallel.pp == 1 or bool(backend)),
        draft_tokens=draft.of(found.g).tokens if drafts else 0,
    )


def _raw_rows(run: PlannerRun, chosen: kernels.Kernels) -> bool:
    """Whether the sparse attention's backends keep plain rows of the latent instead of packed ones."""
    both = [
        run.constraints.engine_arg(f"dsa_{side}_backend") or chosen.flags.get(f"--dsa-{side}-backend")
        for side in ("prefill", "decode")
    ]
    return "trtllm" in both or both == ["tilelang", "tilelang"]


def _dtype(constraints: Constraints) -> str:
    return str(constraints.engine_arg("dtype") or "auto")


def _float(value: Any, default: float) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return default


def _decide_draft(run: PlannerRun, g: geometry.Geometry, parallel: Parallel) -> None:
    """Whether the checkpoint's own MTP layer drafts, for ``SPECULATIVE=auto`` by the goal."""
    if run.constraints.settings.speculative != "auto":
        run.log.decide("speculative", "off", "no draft was asked for", source="default")
    elif not draft.in_checkpoint(run.checkpoint, g):
        run.log.decide("speculative", "off", "the checkpoint has no MTP layer")
    elif parallel.pp > 1:
        run.log.decide("speculative", "off", "stages of a pipeline do not draft unless they are told to")
    elif not run.goal.draft:
        run.log.decide("speculative", "off", f"large batches gain little and the draft takes KV: goal {run.goal.name}")
    else:
        run.log.decide("speculative", "mtp", draft.of(g).reason)


def _say_replicas(run: PlannerRun, case: solve.MemoryCase, result: solve.MemoryResult) -> None:
    """Where the box would serve more with a second replica: on idle GPUs, or on half of those that wait for each other
    over PCIe. It is an operator's step, since each replica has ports and a supervisor of its own."""
    parallel, here = case.parallel, len(run.inventory.gpus)
    if parallel.nodes > 1 or layout.replicas(run.constraints) > 1 or not result.fits:
        return
    how = "a replica each with CUDA_VISIBLE_DEVICES, PORT and CONTROL_PORT of its own, behind `relaunch gateway`"
    world = parallel.tp * parallel.pp
    if here >= 2 * world:
        run.warnings.append(f"{here - world} of the {here} GPUs stay idle: they can serve the model again, {how}")
        return
    pinned = {"tp", "pp"} & run.constraints.pinned.keys()
    if pinned or not run.goal.spread or run.inventory.nvlink or parallel.tp < 2 or parallel.tp % 2:
        return
    # On half the cards a rank holds twice the weights, and at most twice the KV of a token.
    pool = case.load.requests * run.goal.typical * 2 * result.cell
    slack = min(result.pre) * (1 - result.fraction)
    if 2 * max(result.weights) + slack + pool < min(result.pre):
        run.log.append_reason(
            "tp",
            f"half of them hold it too with {case.load.requests} requests: without NVLink two replicas of TP="
            f"{parallel.tp // 2} wait less for each other and answer more together, one client alone slower ({how})",
        )


def _decide_interval(run: PlannerRun, case: solve.MemoryCase) -> None:
    """How often streams go on while prompts wait."""
    found = goals.interval(run.goal, case.g, case.load.requests)
    if found is None or run.embedding or run.constraints.engine_arg("prefill_decode_interval") is not None:
        return
    every, least = found
    run.command.set("--prefill-decode-interval", every)
    run.command.set("--prefill-decode-interval-min-bs", least)
    run.log.record(
        "--prefill-decode-interval",
        every,
        f"a decode step after every prefill step once {least} requests run: one long prompt does not stop their "
        "streams; prompts wait a decode step longer for each of their steps. On H200: 16% more output and a first "
        "token after 0.85 instead of 3.5 s with 256 chats, 3.5% fewer prefill tokens/s when it held for any number",
    )


def _decide_memory(run: PlannerRun, fitted: Fit) -> None:
    """One decision per memory setting, each with its reason."""
    case, result = fitted.case, fitted.result
    log, parallel = run.log, case.parallel
    shares = [memory.allocator_share(gpu, parallel, case.nvlink, case.margin) for gpu in case.gpus]
    log.record(
        ALLOCATOR,
        f"per_process_memory_fraction:{min(shares)}",
        "torch's cache stays out of the margin and of what others will still take",
    )
    decided = {
        "mem_fraction_static": result.fraction,
        "chunked_prefill_size": -1 if run.encoder else case.load.chunk * parallel.dp,
        "context_length": case.load.context,
        "max_running_requests": case.load.requests * parallel.dp,
        "cuda_graph_max_bs": case.load.graph_bs,
    }
    limit = {"max_total_tokens": case.token_limit} if case.token_limit is not None else {}
    reasons = memory_reasons.reasons(run, fitted, {**decided, **limit})
    for name, value in decided.items():
        log.decide(name, value, reasons[name])
    memory_reasons.explain_stages(log, case)
    for name, value in limit.items():
        log.decide(name, value, reasons[name])
    if case.readings:
        log.record(
            "readings",
            sorted(case.readings),
            "an earlier boot measured these; they replace the formulas",
            source="learned",
        )


def _values(run: PlannerRun, case: solve.MemoryCase, result: solve.MemoryResult | None) -> dict[str, Any]:
    """What the engine is told about memory."""
    value, load = run.constraints.value, case.load
    known = result and result.tokens > 0 and result.fraction > 0
    return {
        "mem_fraction_static": value("mem_fraction_static", result.fraction if result and known else None),
        "context_length": load.context,
        "max_running_requests": value("max_running_requests", load.requests * case.parallel.dp),
        "chunked_prefill_size": value("chunked_prefill_size", -1 if run.encoder else load.chunk * case.parallel.dp),
        "cuda_graph_max_bs": value("cuda_graph_max_bs", load.graph_bs),
    }


def _command(run: PlannerRun, chosen: kernels.Kernels, case: solve.MemoryCase, values: dict[str, Any]) -> None:
    command = run.command
    for name, option in (("tp", "--tp-size"), ("pp", "--pp-size"), ("ep", "--ep-size"), ("dp", "--attn-dp-size")):
        size = getattr(case.parallel, name)
        command.set(option, size if size > 1 or name == "tp" else None)
    for option, value in chosen.flags.items():
        command.set(option, value)
    kv_dtype = run.log.value("kv_cache_dtype")
    command.set("--kv-cache-dtype", kv_dtype if kv_dtype != "auto" else None)
    said = values["context_length"] != run.derived or "context_length" in run.constraints.pinned
    command.set("--context-length", values["context_length"] if said else None)
    command.set("--max-running-requests", values["max_running_requests"])
    command.set("--chunked-prefill-size", values["chunked_prefill_size"])
    if run.encoder:
        command.set("--disable-radix-cache")
    if values["cuda_graph_max_bs"]:
        command.set("--cuda-graph-max-bs-decode", values["cuda_graph_max_bs"])
    else:
        command.set("--cuda-graph-backend-decode", "disabled")
    command.set("--mem-fraction-static", values["mem_fraction_static"])
    command.set("--max-total-tokens", case.token_limit)
    if case.draft:
        for option, value in draft.of(case.g).arguments().items():
            command.set(option, value)
    # The scheduler polls with a whole core otherwise, also while nobody asks.
    command.set("--sleep-on-idle")
    run.finish_command()


def _plan(run: PlannerRun, chosen: kernels.Kernels, case: solve.MemoryCase, result: solve.MemoryResult | None) -> Plan:
    """Values, flags and account as the plan document has them."""
    log, load = run.log, case.load
    values = _values(run, case, result)
    _command(run, chosen, case, values)
    planned = run.plan(
        str(log.value("quantization") or method(run.checkpoint.quantization)),
        {
            "gpus": tuple(
                {"index": x.index, "name": x.name, "sm": x.sm, "total_bytes": x.total_bytes, "free_bytes": x.free_bytes}
                for x in case.gpus[: case.parallel.per_node]
            ),
            "device": "cuda",
            "kv_bytes_per_token": int(result.cell) if result else None,
            "per_gpu": result.accounts if result else (),
            "max_total_tokens": result.tokens if result and result.tokens > 0 else None,
            **values,
            **{
                name: log.value(name)
                for name in ("kv_cache_dtype", "attention_backend", "moe_runner_backend", "fp4_gemm_backend")
            },
            "nodes": nodes.document(case, result) if result else (),
            "network": nodes.network(case.g, case.parallel, load),
            "alternatives": alternatives(chosen.context),
        },
    )
    if result is None:
        return planned
    return replace(planned, env={ALLOCATOR: log.value(ALLOCATOR), **chosen.env, **planned.env})
