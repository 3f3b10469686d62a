"""What a person should hear about a plan: combinations that cannot be, and what the account does not know."""

from __future__ import annotations

from ..checkpoint import Checkpoint
from ..checkpoint_geometry import Geometry
from . import solve
from .problem import Problem
from .wish import Wishes

# Flags that move memory in ways that no term here follows.
UNACCOUNTED = (
    "speculative_algorithm",
    "cpu_offload_gb",
    "enable_symm_mem",
    "moe_a2a_backend",
    "dp_size",
    "dcp_size",
    "enable_lora",
    "lora_paths",
    "enable_two_batch_overlap",
    "enable_hisparse",
    "ep_num_redundant_experts",
    "enable_unified_memory",
)


def unaccounted(wishes: Wishes) -> list[str]:
    """One line per ENGINE_ARGS flag that the account leaves out."""
    return [
        f"{given.tokens[0]} in ENGINE_ARGS changes memory in ways that the account does not follow: "
        "the margin must carry it"
        for given in wishes.given
        if given.flag.dest in UNACCOUNTED
    ]


def pages(case: solve.Case, chunk: int) -> Problem | None:
    """The scheduler cuts prompts at page borders."""
    if chunk <= 0 or chunk % case.page == 0:
        return None
    fit = max(case.page, chunk // case.page * case.page)
    name = "CHUNKED_PREFILL_SIZE"
    text = f"{name}={chunk} is not a multiple of the page size {case.page}"
    return Problem(text, ({"chunked_prefill_size": fit}, {"chunked_prefill_size": None}))


def draft(draft: bool, checkpoint: Checkpoint, g: Geometry) -> Problem | None:
    if not draft:
        return None
    has = any(
        f".layers.{g.layers}." in x.name or x.name.startswith("mtp.") or ".mtp." in x.name for x in checkpoint.groups
    )
    return None if has else Problem("SPECULATIVE=mtp, and the checkpoint has no MTP layer", ({"speculative": "off"},))


def cautions(checkpoint: Checkpoint, g: Geometry, result: solve.Result, wishes: Wishes, case: solve.Case) -> list[str]:
    found = []
    if not g.known:
        found.append(
            f"{checkpoint.architecture or 'this architecture'} is not in the planner's table: the account is a "
            f"cautious guess from config.json"
        )
    if checkpoint.generated:
        found.append("there are no shard headers: tensors were generated from config.json")
    if result.unmatched:
        names = ", ".join(result.unmatched[:3])
        found.append(
            f"{len(result.unmatched)} tensor names have no sharding rule and were counted whole on every GPU: {names}"
        )
    context, requests = case.load.context, case.load.requests
    if (
        wishes.is_user_set("context_length")
        and wishes.is_user_set("max_running_requests")
        and 0 < result.tokens < context * requests
    ):
        found.append(
            f"the pool holds {result.tokens // context} requests of full length at once; {requests} share it "
            f"while they are short"
        )
    return found
