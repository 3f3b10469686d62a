"""The settings in force and the worst GPU's memory budget, as far as remedies read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..config.settings import Loaded
from ..plan import Plan


@dataclass(frozen=True)
class EngineConfigView:
    """What remedies may read and change. Sizes in bytes on the worst GPU.

    ``baseline_free_bytes``: free when the engine takes its memory baseline;
    ``reserve_bytes``: all that the account keeps beside weights and pool, ``graph_bytes`` of it for graphs;
    ``user_set``: settings whose value in force comes from the environment or a preset; ``alternatives``: per
    backend setting the values allowed on this GPU, best first; ``pcie_ipc``: sums over the ranks go from
    GPU to GPU over PCIe (SGLANG_ENABLE_PCIE_IPC_ALLREDUCE); ``flags``: engine flags given by name.
    """

    device: str = "cuda"
    sm: int | None = None
    tp: int = 1
    pp: int = 1
    nnodes: int = 1
    mem_fraction_static: float | None = None
    cuda_graph_max_bs: int | None = None
    chunked_prefill_size: int | None = None
    max_running_requests: int | None = None
    context_length: int | None = None
    kv_cache_dtype: str | None = None
    attention_backend: str | None = None
    moe_runner_backend: str | None = None
    fp4_gemm_backend: str | None = None
    speculative: bool = False
    pcie_ipc: bool = False
    is_embedding: bool = False
    kv_bytes_per_token: int | None = None
    page_size: int = 64
    total_bytes: int | None = None
    baseline_free_bytes: int | None = None
    weights_bytes: int | None = None
    reserve_bytes: int | None = None
    graph_bytes: int = 0
    user_set: frozenset[str] = frozenset()
    alternatives: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    flags: frozenset[str] = frozenset()

    @property
    def ranks(self) -> int:
        """Processes that compute, over all nodes."""
        return self.tp * self.pp

    @property
    def planned_fraction(self) -> float | None:
        """The largest fraction that leaves the whole reserve free: 1 - reserve / baseline."""
        if not self.baseline_free_bytes or self.reserve_bytes is None:
            return None
        return 1 - self.reserve_bytes / self.baseline_free_bytes


def of(plan: Plan, loaded: Loaded) -> EngineConfigView:
    """Return the view of the plan in force and of the settings behind it."""
    sized = [
        (int(gpu["total_bytes"]) - account.baseline_bytes, gpu, account)
        for account in plan.per_gpu
        for gpu in plan.gpus
        if gpu.get("index") == account.index
    ]
    worst = min(sized, key=lambda item: (item[0], -item[2].weights_bytes), default=None)
    free, gpu, account = worst if worst else (None, None, None)
    sm = next((int(gpu["sm"]) for gpu in plan.gpus if gpu.get("sm")), None)
    users = {name for name in loaded.sources if loaded.is_user_set(name)}
    healed = {decision.setting for decision in plan.decisions if decision.source == "learned"}
    named = {given_flag.flag.option for given_flag in loaded.engine_args}
    return EngineConfigView(
        device=plan.device,
        sm=sm,
        tp=int(plan.parallel.get("tp") or 1),
        pp=int(plan.parallel.get("pp") or 1),
        nnodes=int(plan.parallel.get("nnodes") or 1),
        mem_fraction_static=plan.mem_fraction_static,
        cuda_graph_max_bs=plan.cuda_graph_max_bs,
        chunked_prefill_size=plan.chunked_prefill_size,
        max_running_requests=plan.max_running_requests,
        context_length=plan.context_length,
        kv_cache_dtype=plan.kv_cache_dtype,
        attention_backend=plan.attention_backend,
        moe_runner_backend=plan.moe_runner_backend,
        fp4_gemm_backend=plan.fp4_gemm_backend,
        speculative=any(flag.startswith("--speculative-") for flag in plan.flags),
        pcie_ipc={**plan.env, **loaded.environment}.get("SGLANG_ENABLE_PCIE_IPC_ALLREDUCE") == "1",
        is_embedding=plan.is_embedding,
        kv_bytes_per_token=plan.kv_bytes_per_token,
        total_bytes=int(gpu["total_bytes"]) if gpu else None,
        baseline_free_bytes=free,
        weights_bytes=account.weights_bytes if account else None,
        reserve_bytes=(
            account.graph_bytes + account.activation_bytes + account.runtime_bytes + account.margin_bytes
            if account
            else None
        ),
        graph_bytes=account.graph_bytes if account else 0,
        user_set=frozenset((users | {_field(option) for option in named}) - healed),
        alternatives=plan.alternatives,
        flags=frozenset(flag for flag in plan.flags if flag.startswith("--")) | frozenset(named),
    )


def _field(option: str) -> str:
    name = option.removeprefix("--").replace("-", "_")
    return {"cuda_graph_max_bs_decode": "cuda_graph_max_bs"}.get(name, name)
