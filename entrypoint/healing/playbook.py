"""What to do after an end: for each cause its remedies, tried in order, each a limited number of times. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from . import remedies_kernels, remedies_memory
from .causes import catalogue
from .classify import Verdict
from .engine_config import EngineConfigView
from .remediation import Attempt, Remediation, RemediationContext
from .remedies_memory import Changes

__all__ = ["Attempt", "EngineConfigView", "Remediation", "decide"]

# Unchanged restarts that may help any number of times: the supervisor's restart budget is their only end.
BUDGETED = None


@dataclass(frozen=True)
class Remedy:
    """One thing to try. ``change`` returns the changes of settings, or None when the remedy does not apply.
    ``times``: how often a remedy that changes nothing may be taken for one cause and stage; None: as often as the
    restart budget allows. ``clear``: compiled kernels and tuning results are removed first."""

    action: str
    change: Callable[[RemediationContext], Changes]
    times: int | None = 0
    clear: bool = False
    wait: Literal["gpu_memory", "backoff", "none"] = "none"


def _same(_: RemediationContext) -> Changes:
    return ()


def _again(times: int | None, action: str = "restart_same", *, clear: bool = False) -> Remedy:
    wait: Literal["gpu_memory", "backoff"] = "gpu_memory" if action == "wait_for_gpu_memory" else "backoff"
    return Remedy(action, _same, times, clear, wait)


_LOWER = Remedy("lower_fraction", remedies_memory.lower_fraction)
_NEXT_FP4 = Remedy("switch_backend", remedies_kernels.next_fp4_gemm, clear=True)
_NO_AUTOTUNE = Remedy("switch_backend", remedies_memory.autotune_off, clear=True)
_NO_PCIE_SUMS = Remedy("disable_p2p", remedies_kernels.pcie_sums_off)
_BREAKABLE = Remedy("shrink_graphs", remedies_memory.breakable_graphs)
_INSANE = (
    _NO_PCIE_SUMS,
    _again(1, "clear_jit_cache", clear=True),
    _NEXT_FP4,
    _NO_AUTOTUNE,
    Remedy("switch_backend", remedies_kernels.wider_kv, clear=True),
)
_NO_TRANSPORTS = Remedy("disable_p2p", remedies_kernels.transports_off)

PLAYBOOK: dict[str, tuple[Remedy, ...]] = {
    "kv_pool_too_small": (
        Remedy("raise_fraction", remedies_memory.raise_fraction),
        Remedy("raise_fraction", remedies_memory.shorten_context),
    ),
    "oom_kv_alloc": (_LOWER,),
    "oom_graph_capture": (
        Remedy("shrink_graphs", remedies_memory.shrink_graphs_once),
        _LOWER,
        Remedy("shrink_graphs", remedies_memory.shrink_graphs),
        Remedy("shrink_graphs", remedies_memory.graphs_off),
    ),
    "oom_prefill": (
        Remedy("shrink_prefill", remedies_memory.halve_chunk),
        _LOWER,
        Remedy("shrink_prefill", remedies_memory.halve_chunk_again),
        Remedy("lower_fraction", remedies_memory.fewer_requests),
    ),
    "oom_runtime": (
        _LOWER,
        Remedy("lower_fraction", remedies_memory.fewer_requests),
        Remedy("switch_backend", remedies_memory.autotune_off),
    ),
    "memory_unbalanced": (_again(3, "wait_for_gpu_memory"),),
    "host_oom": (Remedy("reduce_host_memory", remedies_kernels.fewer_jobs),),
    "unsupported_kernel": (
        Remedy("switch_backend", remedies_kernels.named_remedy),
        Remedy("switch_backend", remedies_kernels.next_backend),
    ),
    "graph_capture_failed": (
        Remedy("shrink_graphs", remedies_memory.prefill_graphs_off),
        Remedy("shrink_graphs", remedies_memory.shrink_graphs_once),
        _BREAKABLE,
        Remedy("shrink_graphs", remedies_memory.graphs_off),
    ),
    "spec_decode_crash": (
        Remedy("switch_backend", remedies_kernels.draft_on_triton),
        Remedy("disable_speculation", remedies_kernels.speculation_off),
    ),
    "nan_output": _INSANE,
    "degenerate_output": _INSANE,
    "engine_crash": (_again(BUDGETED),),
    "killed": (_again(BUDGETED),),
    "hang_serving": (_NO_PCIE_SUMS, _again(BUDGETED)),
    "node_lost": (_again(BUDGETED),),
    "unknown": (_again(2),),
    "port_in_use": (_again(2),),
    "nccl_init_hang": (_NO_TRANSPORTS,),
    "nccl_error": (_NO_TRANSPORTS,),
    "jit_cache_stale": (_again(1, "clear_jit_cache", clear=True),),
    "weights_missing": (_again(1, "repair_weights"),),
    "weights_corrupt": (_again(1, "repair_weights"),),
    "checkpoint_mismatch": (Remedy("switch_backend", remedies_kernels.unfuse_shared_experts),),
    "hub_unavailable": (_again(BUDGETED, "retry_download"),),
    "hub_rate_limited": (_again(BUDGETED, "retry_download"),),
    "download_stalled": (
        Remedy("retry_download", remedies_kernels.plain_download, wait="backoff"),
        _again(3, "retry_download"),
    ),
    "hang_startup": (_NO_PCIE_SUMS, _again(1), Remedy("restart_same", remedies_kernels.prefetch_weights)),
}
# hang_startup where kernels are built or tuned: the caches may be at fault, then the path between the GPUs.
_HANG_BUILDING = (_NO_PCIE_SUMS, _again(1), _again(2, "clear_jit_cache", clear=True), _NO_TRANSPORTS)
_HANG_CAPTURING = (
    _NO_PCIE_SUMS,
    _again(1),
    _BREAKABLE,
    Remedy("shrink_graphs", remedies_memory.graphs_off),
    _NO_TRANSPORTS,
)
# While serving, connections break because a rank died (killed from outside it says nothing itself); the transports
# worked until then, and going without them is slow for as long as it is remembered.
_LOST_RANK = (_again(3), _NO_TRANSPORTS)
# Nothing is wrong with the engine.
_FROM_OUTSIDE = (_again(BUDGETED),)
# One rank has no transports that could be at fault.
_ONE_RANK = (_again(2),)
_STOPS = ("stop_config", "stop_operator")
# When every remedy is used up these need a person at the machine; for the others the configuration must change.
_OPERATOR_AFTER = frozenset(
    {
        "nccl_init_hang",
        "nccl_error",
        "memory_unbalanced",
        "host_oom",
        "port_in_use",
        "killed",
        "hang_serving",
        "hub_unavailable",
        "node_lost",
    }
)


def decide(verdict: Verdict, config: EngineConfigView, history: tuple[Attempt, ...]) -> Remediation:
    """Return what to do after ``verdict``, given what was tried before. Every remedy either changes a
    setting in one direction within its bounds, or may be taken a fixed number of times, or starts the same again as
    long as the restart budget lasts."""
    if verdict.cause == "none":
        return Remediation("keep_running", reason=verdict.summary, next_step=verdict.next_step, restart=False)
    context = RemediationContext(verdict, config, history)
    for remedy in _remedies_for(context):
        changes = remedy.change(context)
        used_up = remedy.times is not None and context.repeats() >= remedy.times
        if changes is None or (not changes and used_up):
            continue
        return Remediation(
            remedy.action,
            changes,
            reason=_reason(verdict, remedy, changes),
            next_step=verdict.next_step,
            wait_for=remedy.wait,
            repair=verdict.files if remedy.action == "repair_weights" else (),
            clear_jit_cache=remedy.clear,
        )
    return _give_up(context)


def _remedies_for(context: RemediationContext) -> tuple[Remedy, ...]:
    cause, stage = context.verdict.cause, context.verdict.stage
    if context.verdict.outside:
        return _FROM_OUTSIDE
    if cause in ("nccl_init_hang", "nccl_error") and context.config.ranks == 1:
        return _ONE_RANK
    if cause == "hang_startup" and stage == "graph_capture":
        return _HANG_CAPTURING
    if cause == "hang_startup" and stage in ("jit_build", "warmup", "first_forward"):
        return _HANG_BUILDING
    if cause == "nccl_error" and stage == "serving":
        return _LOST_RANK
    return PLAYBOOK.get(cause, ())


def _reason(verdict: Verdict, remedy: Remedy, changes: tuple[object, ...]) -> str:
    words = {
        "restart_same": "starting again with the same settings",
        "clear_jit_cache": "removing compiled kernels and tuning results, then starting again",
        "wait_for_gpu_memory": "waiting until the GPU memory is free, then starting again with the same settings",
        "repair_weights": "fetching the bad files again, then starting again",
        "retry_download": "fetching again after a wait",
    }
    if not changes:
        return f"{verdict.summary}: {words.get(remedy.action, remedy.action)}"
    told = "; ".join(f"{c.setting} {c.before} -> {c.after} ({c.reason})" for c in changes)  # type: ignore[attr-defined]
    return f"{verdict.summary}: {told}"


def _give_up(context: RemediationContext) -> Remediation:
    verdict = context.verdict
    first = catalogue().causes[verdict.cause].action
    if first in _STOPS:
        action, reason = first, f"{verdict.summary}; no restart can help"
    else:
        action = "stop_operator" if verdict.cause in _OPERATOR_AFTER else "stop_config"
        done = context.count()
        reason = f"{verdict.summary}; " + (
            f"{done} attempts did not help and nothing is left to try" if done else "nothing is left to try"
        )
    return Remediation(action, give_up=True, reason=reason, next_step=verdict.next_step, restart=False)
