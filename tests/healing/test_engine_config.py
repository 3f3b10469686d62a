"""EngineConfigView: what the playbook reads from a plan and from the settings behind it."""

from __future__ import annotations

from dataclasses import replace

from entrypoint.config.settings import load
from entrypoint.healing.engine_config import of
from entrypoint.plan import Account, Decision, Plan

GIB = 1 << 30


def account(index: int, baseline: int) -> Account:
    return Account(
        index=index,
        baseline_bytes=baseline,
        weights_bytes=55 * GIB,
        kv_bytes=20 * GIB,
        graph_bytes=2 * GIB,
        activation_bytes=9 * GIB,
        runtime_bytes=2 * GIB,
        margin_bytes=GIB,
        free_bytes=0,
        load_peak_bytes=60 * GIB,
    )


PLAN = Plan(
    feasible=True,
    reasons=(),
    model={},
    gpus=tuple({"index": i, "name": "x", "sm": 120, "total_bytes": 95 * GIB, "free_bytes": 94 * GIB} for i in range(2)),
    parallel={"tp": 2, "pp": 1, "ep": 1, "dp_attention": 1, "nnodes": 1},
    device="cuda",
    kv_bytes_per_token=61_464,
    per_gpu=(account(0, GIB), account(1, 3 * GIB)),
    mem_fraction_static=0.85,
    max_total_tokens=1000,
    context_length=131_072,
    max_running_requests=32,
    chunked_prefill_size=8192,
    cuda_graph_max_bs=32,
    kv_cache_dtype="fp8_e4m3",
    attention_backend="dsa",
    moe_runner_backend="flashinfer_cutlass",
    fp4_gemm_backend="flashinfer_cutlass",
    is_embedding=False,
    flags=("--tp-size", "2", "--speculative-algorithm", "EAGLE"),
    env={},
    decisions=(),
    alternatives={"fp4_gemm_backend": ("flashinfer_cutlass", "flashinfer_cudnn")},
)


def test_the_fullest_card_counts() -> None:
    facts = of(PLAN, load({"RELAUNCH_MODEL": "m"}, {}))
    assert facts.baseline_free_bytes == 92 * GIB
    assert facts.reserve_bytes == 14 * GIB and facts.graph_bytes == 2 * GIB
    assert facts.planned_fraction == 1 - 14 / 92
    assert facts.speculative and facts.sm == 120 and facts.tp == 2
    assert "flashinfer_cudnn" in facts.alternatives["fp4_gemm_backend"]
    assert "--speculative-algorithm" in facts.flags


def test_what_the_operator_set_is_known_until_healing_changes_it() -> None:
    environ = {"RELAUNCH_MODEL": "m", "RELAUNCH_MEM_FRACTION_STATIC": "0.95"}
    environ["RELAUNCH_ENGINE_ARGS"] = "--cuda-graph-max-bs-decode 16 --disable-flashinfer-autotune"
    facts = of(PLAN, load(environ, {}))
    assert {"mem_fraction_static", "cuda_graph_max_bs"} <= facts.user_set
    assert "--disable-flashinfer-autotune" in facts.flags
    healed = replace(PLAN, decisions=(Decision("mem_fraction_static", 0.85, "learned", "too high"),))
    assert "mem_fraction_static" not in of(healed, load(environ, {})).user_set


def test_a_plan_without_gpus_has_no_sizes() -> None:
    cpu = replace(PLAN, gpus=(), per_gpu=(), device="cpu", flags=(), alternatives={})
    facts = of(cpu, load({"RELAUNCH_MODEL": "m"}, {}))
    assert facts.baseline_free_bytes is None and facts.planned_fraction is None
    assert facts.alternatives == {} and not facts.speculative
