"""What a person should hear about a plan: combinations that cannot be, and what the account does not know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..checkpoint import engine_models
from ..checkpoint.geometry import Geometry
from ..checkpoint.model import Checkpoint
from ..config import engine_flags
from ..host.inventory import Gpu
from ..units import GIB, format_bytes
from . import nodes, pipeline, solve
from .constraints import Constraints
from .draft import in_checkpoint
from .kernel_limits import OLDEST
from .plan import VISIBLE, Infeasibility
from .run import PlannerRun
from .sharding import Parallel

# --hicache-ratio when none is given (arg_groups/hicache_hook.py).
HICACHE_RATIO = 2.0
# A pool below this many tokens is said to be small.
WORTHWHILE = 8192
# Flags that move memory in ways that no term here follows.
UNACCOUNTED = (
    "speculative_algorithm",
    "cpu_offload_gb",
    "enable_symm_mem",
    "moe_a2a_backend",
    "dcp_size",
    "enable_lora",
    "lora_paths",
    "enable_two_batch_overlap",
    "enable_hisparse",
    "ep_num_redundant_experts",
    "enable_unified_memory",
)


def unaccounted(constraints: Constraints) -> list[str]:
    """One line per ENGINE_ARGS flag that the account leaves out."""
    return [
        f"{given.tokens[0]} in ENGINE_ARGS changes memory in ways that the account does not follow: "
        "the margin must carry it"
        for given in constraints.given
        if given.flag.dest in UNACCOUNTED
    ]


def uneven_pages(case: solve.MemoryCase, chunk: int) -> Infeasibility | None:
    """The scheduler cuts prompts at page borders."""
    if chunk <= 0 or chunk % case.page == 0:
        return None
    fit = max(case.page, chunk // case.page * case.page)
    name = "CHUNKED_PREFILL_SIZE"
    text = f"{name}={chunk} is not a multiple of the page size {case.page}"
    return Infeasibility(text, ({"chunked_prefill_size": fit}, {"chunked_prefill_size": None}))


def page(constraints: Constraints, page: int) -> list[str]:
    """A page size that the attention backend replaces."""
    asked = constraints.engine_arg("page_size")
    if asked is None or str(asked) == str(page):
        return []
    return [
        f"--page-size {asked} in ENGINE_ARGS: the engine takes {page} with this attention backend, and so does the "
        "account"
    ]


def too_old(gpus: tuple[Gpu, ...]) -> Infeasibility | None:
    """GPUs that no kernel of the engine is built for."""
    found = [gpu for gpu in gpus if gpu.sm < OLDEST]
    if not found:
        return None
    names = ", ".join(f"GPU {gpu.index} ({gpu.name}, SM {gpu.sm})" for gpu in found[:3])
    return Infeasibility(f"{names}: the engine has no kernels for GPUs before SM {OLDEST}", alone(gpus))


def unknown_class(checkpoint: Checkpoint) -> Infeasibility | None:
    """An architecture that neither the engine nor transformers has a class for (models/registry.py)."""
    architecture = checkpoint.architecture
    if engine_models.serves(architecture) or checkpoint.config.get("auto_map"):
        return None  # a class that the checkpoint brings along is the engine's to judge
    return Infeasibility(
        f"{architecture} is no class that sglang {engine_flags.engine_version()} or its transformers has: it cannot be "
        "served by this engine"
    )


def host_pools(run: PlannerRun, case: solve.MemoryCase, result: solve.MemoryResult) -> tuple[int, Infeasibility | None]:
    """(bytes of host memory that the ranks of one node pin for a hierarchical cache, what speaks against them):
    ``--hicache-size`` in GB a rank, else ``--hicache-ratio`` times the GPU's pool (mem_cache/memory_pool_host.py)."""
    arg = run.constraints.engine_arg
    if not arg("enable_hierarchical_cache"):
        return 0, None
    size, ratio = _number(arg("hicache_size")), _number(arg("hicache_ratio")) or HICACHE_RATIO
    pool = int(size * 10**9) or int(ratio * result.tokens * result.cell)
    taken, host = pool * case.parallel.per_node, run.inventory.host_memory_bytes
    if not 0 < host < taken:
        return taken, None
    option = "--hicache-size" if size else "--hicache-ratio"
    ranks = case.parallel.per_node
    text = f"{option}: {ranks} ranks pin {format_bytes(taken)} of host memory, {format_bytes(host)} are there"
    return taken, Infeasibility(text, ({option: None}, {"--enable-hierarchical-cache": None, option: None}))


def _number(value: object) -> float:
    try:
        return float(str(value))
    except ValueError:
        return 0.0


def mixed(gpus: tuple[Gpu, ...]) -> list[str]:
    """GPUs of several architectures under one model."""
    kinds = sorted({f"{gpu.name} (SM {gpu.sm})" for gpu in gpus})
    if len({gpu.sm for gpu in gpus}) < 2:
        return []
    return [
        f"GPUs of different architectures work on one model: {', '.join(kinds)}; kernels are chosen for the "
        "oldest, and the engine was not seen to run so"
    ]


def alone(gpus: tuple[Gpu, ...]) -> tuple[dict[str, Any], ...]:
    """The GPUs of a mixed box that are alike, by themselves, those with most memory first."""
    kinds: dict[tuple[int, int], list[int]] = {}
    for gpu in gpus:
        kinds.setdefault((gpu.free_bytes // (4 * GIB), gpu.sm), []).append(gpu.index)
    ranked = sorted(kinds.items(), key=lambda kind: -kind[0][0] * len(kind[1]))
    return tuple({VISIBLE: tuple(indices), "tp": None} for _, indices in ranked) if len(kinds) > 1 else ()


def no_draft_layer(draft: bool, checkpoint: Checkpoint, g: Geometry) -> Infeasibility | None:
    """A draft that was asked for and that the checkpoint does not have."""
    if not draft:
        return None
    if in_checkpoint(checkpoint, g):
        return None
    return Infeasibility("SPECULATIVE=mtp, and the checkpoint has no MTP layer", ({"speculative": "off"},))


def several_nodes(constraints: Constraints, case: solve.MemoryCase, here: int) -> Iterator[str]:
    """What several nodes of ``here`` GPUs each should hear. Nothing on one node."""
    parallel = case.parallel
    if parallel.nodes == 1:
        return
    yield f"planned for {parallel.nodes} boxes like this one: what the others really hold is not looked at"
    if 0 < parallel.per_node < here:
        yield f"{here - parallel.per_node} of the {here} GPUs of each box stay idle"
    if parallel.span > 1:
        yield _wide(constraints, case)
    if constraints.engine_env("NCCL_IB_DISABLE") == "1":
        yield "NCCL_IB_DISABLE=1: between the boxes NCCL takes TCP alone; set it to 0 if they have InfiniBand or RoCE"
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if constraints.engine_env(name) == "lo":
            yield f"{name}=lo: ranks meet over the loopback alone, which reaches no other box"


def _wide(constraints: Constraints, case: solve.MemoryCase) -> str:
    """A tensor-parallel group over several boxes, in numbers."""
    parallel, g = case.parallel, case.g
    crossing = nodes.network(g, parallel, case.load)
    assert crossing is not None and crossing["tensor"] is not None
    wide = crossing["tensor"]
    prefill, decode = nodes.size(wide["bytes_per_prefill_step"]), nodes.size(wide["bytes_per_decode_step"])
    text = (
        f"TP={parallel.tp} lies over {parallel.span} boxes: {wide['all_reduces']} all-reduces of every step cross the "
        f"network, one after the other; each box sends at least {prefill} for {crossing['prefill_tokens']} tokens of "
        f"prefill and {decode} for a decode step of {crossing['decode_tokens']} requests"
    )
    stages = parallel.pp * parallel.span
    if parallel.tp % parallel.span or stages > g.layers or not pipeline.possible(constraints, g):
        return text
    narrow = Parallel(parallel.tp // parallel.span, stages, nodes=parallel.nodes)
    pipe = (nodes.network(g, narrow, case.load) or {})["pipeline"]
    prefill, decode = nodes.size(pipe["bytes_per_prefill_step"]), nodes.size(pipe["bytes_per_decode_step"])
    return f"{text}; TP={narrow.tp} with PP={stages} would send {prefill} and {decode}, in one message"


def account(run: PlannerRun, case: solve.MemoryCase, result: solve.MemoryResult) -> list[str]:
    """How far the account is to be trusted, and what shares the pool."""
    found = []
    name = run.checkpoint.architecture or "this architecture"
    if case.engine is not None:
        found.append(
            f"{name} is not known well enough here: weights and pools are what the installed engine said of it"
        )
    elif not run.checkpoint.well_known:
        found.append(
            f"{name} is not known well enough: the account is a guess from config.json; with the engine installed "
            f"(./relaunch install engine) the plan takes its answer"
        )
    if run.checkpoint.generated:
        found.append("there are no shard headers: tensors were generated from config.json")
    if result.unmatched:
        names = ", ".join(result.unmatched[:3])
        found.append(
            f"{len(result.unmatched)} tensor names have no sharding rule and were counted whole on every GPU: {names}"
        )
    if case.parallel.dp > 1:
        found.append(
            f"each of the {case.parallel.dp} attention groups has a pool of its own: {result.tokens} tokens are those "
            f"of one group"
        )
    if 0 < result.tokens < WORTHWHILE <= run.derived:
        found.append(f"the pool holds {result.tokens} tokens: one request, or a few short ones")
    context, requests = case.load.context, case.load.requests
    if (
        run.constraints.is_user_set("context_length")
        and run.constraints.is_user_set("max_running_requests")
        and 0 < result.tokens < context * requests
    ):
        found.append(
            f"the pool holds {result.tokens // context} requests of full length at once; {requests} share it "
            f"while they are short"
        )
    return found
