"""What the goal changes: requests, prefill step, interval, speculation; PCIe sums; KV in host memory."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from planned import GIB, adds_up, h200, make, read, rtx

from entrypoint import plan
from entrypoint.config import settings
from entrypoint.engine import command
from entrypoint.host.inventory import Gpu, Inventory
from entrypoint.kernels import kernels
from entrypoint.plan import draft, goal, memory, sharding

IPC = "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"


def flag(planned: plan.Plan, option: str) -> str | None:
    words = list(planned.flags)
    return words[words.index(option) + 1] if option in words else None


def reasons(planned: plan.Plan) -> dict[str, str]:
    return {decision.setting: decision.reason for decision in planned.decisions}


def card(total: int, sm: int = 89, count: int = 1) -> Inventory:
    gpus = tuple(Gpu(i, "card", sm, total, total - (616 << 20)) for i in range(count))
    return Inventory(gpus=gpus, host_memory_bytes=256 * GIB)


@pytest.mark.parametrize("model", ["llama-8b", "qwen3-30b-a3b", "gpt-oss-20b", "glm-5-8-layers"])
def test_balanced_takes_what_served_most_on_h200(model: str) -> None:
    """256 requests, graphs for all of them, the engine's own step, a decode step between prefill steps."""
    planned = make(model, h200(1))
    assert planned.goal == "balanced" and planned.feasible and adds_up(planned)
    assert (planned.max_running_requests, planned.cuda_graph_max_bs, planned.chunked_prefill_size) == (256, 256, 8192)
    assert flag(planned, "--prefill-decode-interval") == "1"
    assert flag(planned, "--prefill-decode-interval-min-bs") == "32"
    engine = memory.engine_default(read_geometry(model), sharding.Parallel(), planned.gpus[0]["total_bytes"])
    assert planned.mem_fraction_static is not None and planned.mem_fraction_static >= engine - 0.01


def read_geometry(model: str):  # type: ignore[no-untyped-def]
    from entrypoint.checkpoint import geometry

    found = read(model)
    return geometry.of(found.config, found.architecture)


def test_goals_differ_where_their_loads_do() -> None:
    plans = {name: make("qwen3-30b-a3b", h200(1), GOAL=name) for name in goal.GOALS}
    assert [plans[name].chunked_prefill_size for name in plans] == [8192, 8192, 16384, 4096]
    assert [flag(plans[name], "--prefill-decode-interval-min-bs") for name in plans] == ["32", "1", "64", "24"]
    tokens = {name: planned.max_total_tokens or 0 for name, planned in plans.items()}
    assert tokens["context"] == max(tokens.values())
    assert tokens["throughput"] == tokens["balanced"], "twice the step fits into what is set aside for the engine's own"


@pytest.mark.parametrize(
    ("box", "requests", "tokens"), [(card(24564 << 20), 16, 32_000), (card(32607 << 20, 120), 40, 80_000)]
)
def test_a_small_card_serves_many_requests_at_the_engines_own_step(box: Inventory, requests: int, tokens: int) -> None:
    """An 8B model in 16 bits had 8,192 tokens and 2 requests on 24 GB while 3.6 GiB were idle."""
    for asked in ({}, {"CONTEXT_LENGTH": 4096}):
        planned = make("llama-8b", box, **asked)
        assert planned.chunked_prefill_size == 4096
        assert (planned.max_running_requests or 0) >= requests and (planned.max_total_tokens or 0) >= tokens


def test_a_smaller_step_is_taken_only_for_a_context_that_needs_it_and_says_its_price() -> None:
    box = card(24564 << 20)
    most = make("llama-8b", box).max_total_tokens or 0
    longer = (most // 1024 + 2) * 1024
    planned = make("llama-8b", box, CONTEXT_LENGTH=longer)
    assert planned.feasible and planned.chunked_prefill_size == 2048
    said = reasons(planned)["chunked_prefill_size"]
    assert "2 times as many prefill steps as 4096" in said and "% fewer" in said


def test_64_requests_are_the_most_for_sparse_attention_on_sm120_alone() -> None:
    assert make("glm-5-nvfp4", rtx()).max_running_requests == 64
    assert make("minimax-m2-8-layers", rtx()).max_running_requests == 256
    assert make("minimax-m2-8-layers", rtx(), GOAL="throughput").max_running_requests == 256
    assert make("minimax-m2-8-layers", h200(4), GOAL="throughput").max_running_requests == 512


@pytest.mark.parametrize(
    ("environ", "drafts"),
    [
        ({"SPECULATIVE": "auto"}, True),
        ({"SPECULATIVE": "auto", "GOAL": "latency"}, True),
        ({"SPECULATIVE": "auto", "GOAL": "throughput"}, False),
        ({"SPECULATIVE": "auto", "GOAL": "context"}, False),
        ({"SPECULATIVE": "mtp", "GOAL": "throughput"}, True),
        ({}, False),
    ],
)
def test_the_goal_decides_whether_a_draft_is_worth_it(environ: dict[str, str], drafts: bool) -> None:
    planned = make("glm-5-nvfp4", rtx(), **environ)
    assert planned.feasible
    assert ("--speculative-algorithm" in planned.flags) is drafts
    if drafts:
        assert planned.max_running_requests == planned.cuda_graph_max_bs == goal.MOST_DRAFTING
        assert "every running request decodes from a graph" in reasons(planned)["cuda_graph_max_bs"]


def test_a_model_without_a_draft_layer_serves_without_one() -> None:
    assert make("llama-8b", h200(1), SPECULATIVE="auto").feasible
    assert "no MTP layer" in reasons(make("llama-8b", h200(1), SPECULATIVE="auto"))["speculative"]


def test_qwen3_5_drafts_two_tokens_and_keeps_an_extra_buffer() -> None:
    arguments = draft.of(read_geometry("qwen3.5-12-layers")).arguments()
    assert arguments["--speculative-num-steps"] == 2 and arguments["--speculative-num-draft-tokens"] == 3
    assert arguments["--mamba-radix-cache-strategy"] == "extra_buffer"


@pytest.mark.parametrize(
    ("box", "environ", "passed", "on"),
    [
        (rtx(8), {}, {}, True),
        (rtx(4), {}, {}, True),
        (rtx(2), {}, {}, True),
        (replace(rtx(4), peers=True), {}, {}, True),
        (replace(rtx(4), peers=False), {}, {}, False),
        (replace(rtx(4), nvlink=True), {}, {}, False),
        (rtx(1), {}, {}, False),
        (rtx(8), {"DP_ATTENTION": 2}, {}, False),
        (rtx(4), {"NNODES": 2, "TP": 8, "PP": 1}, {}, False),
        (rtx(4), {"ENGINE_ARGS": "--dtype float16"}, {}, False),
        (rtx(4), {"ENGINE_ARGS": "--enable-deterministic-inference"}, {}, False),
        (rtx(4), {"ENGINE_ARGS": "--disable-flashinfer-autotune"}, {}, False),
        (rtx(4), {}, {"NCCL_P2P_DISABLE": "1"}, False),
    ],
)
def test_sums_go_over_pcie_where_the_engines_kernels_take_them(
    box: Inventory, environ: dict[str, object], passed: dict[str, str], on: bool
) -> None:
    planned = make("qwen3-30b-a3b", box, passed=passed, **environ)
    assert (planned.env.get(IPC) == "1") is on


def test_what_the_operator_says_of_sums_over_pcie_stands() -> None:
    assert IPC not in make("qwen3-30b-a3b", rtx(4), passed={IPC: "0"}).env
    healed = make("qwen3-30b-a3b", rtx(4), changes=(plan.Change(IPC, "1", "0", "ranks hung"),))
    assert healed.env[IPC] == "0"


def test_the_workspace_of_sums_over_pcie_is_in_the_account() -> None:
    on, off = make("qwen3-30b-a3b", rtx(8)), make("qwen3-30b-a3b", rtx(8), passed={IPC: "0"})
    # Two regions of two epochs of eight ranks, and the ring: 256 rows of 2,048 in bf16.
    least = 4 * 8 * 256 * 2048 * 2
    grown = on.per_gpu[0].runtime_bytes - off.per_gpu[0].runtime_bytes
    assert least < grown < least * 1.1


def test_two_gpus_without_nvlink_keep_the_custom_all_reduce() -> None:
    """custom_all_reduce_utils.py: refused for more than two GPUs on PCIe."""
    assert "--disable-custom-all-reduce" not in make("qwen3-30b-a3b", rtx(2)).flags
    assert "--disable-custom-all-reduce" in make("qwen3-30b-a3b", rtx(4)).flags


@pytest.mark.parametrize(("asked", "feasible"), [("off", True), ("auto", True), ("64GiB", True), ("300GiB", False)])
def test_host_memory_keeps_kv_within_what_the_host_has(asked: str, feasible: bool) -> None:
    planned = make("llama-8b", replace(h200(1), host_memory_bytes=256 * GIB), HOST_KV=asked)
    assert planned.feasible is feasible
    pinned = (planned.host or {})["pools_bytes"]
    if asked == "off":
        assert pinned == 0 and "--enable-hierarchical-cache" not in planned.flags
    elif feasible:
        assert flag(planned, "--hicache-size") == str(pinned // 10**9)
        assert "tokens more in host memory" in reasons(planned)["host_kv"]
    else:
        assert "the host has 256.00 GiB" in planned.reasons[0]
    if asked == "64GiB":
        assert pinned == 64 * GIB // 10**9 * 10**9


def test_a_host_without_room_and_a_cache_that_is_off_keep_nothing() -> None:
    box = replace(h200(1), host_memory_bytes=11 * GIB)
    assert "--enable-hierarchical-cache" not in make("llama-8b", box, HOST_KV="auto").flags
    refused = make("llama-8b", h200(1), HOST_KV="64GiB", ENGINE_ARGS="--disable-radix-cache")
    assert not refused.feasible and "without a prefix cache" in refused.reasons[0]


def test_a_default_effort_reaches_the_chat_template() -> None:
    planned = make("glm-5.2-nvfp4", rtx(), REASONING_EFFORT="high")
    assert json.loads(flag(planned, "--default-chat-template-kwargs") or "") == {"reasoning_effort": "high"}


def test_idle_and_waiting_gpus_are_offered_to_a_second_replica() -> None:
    assert any("4 of the 8 GPUs stay idle" in text for text in make("qwen3-30b-a3b", rtx(8), TP=4).warnings)
    assert "two replicas of TP=4" in reasons(make("qwen3-30b-a3b", rtx(8)))["tp"]
    assert "two replicas" not in reasons(make("qwen3-30b-a3b", rtx(8), GOAL="latency"))["tp"]
    assert "two replicas" not in reasons(make("glm-5-nvfp4", rtx(8)))["tp"]


def test_every_decision_of_a_goal_says_what_it_costs_or_gains() -> None:
    said = reasons(make("qwen3-30b-a3b", h200(1), GOAL="throughput"))
    assert "tokens per second" in said["goal"]
    assert "5% faster" in said["chunked_prefill_size"] and "streams wait longer" in said["chunked_prefill_size"]
    assert "more wait their turn" in said["max_running_requests"]
    assert "fewer prefill tokens/s" in said["--prefill-decode-interval"]


def test_pooled_clients_keep_their_connections() -> None:
    assert command.DEFAULTS["SGLANG_TIMEOUT_KEEP_ALIVE"] == "900"


def test_tuned_sums_lie_with_the_compiled_kernels(tmp_path: object) -> None:
    """flashinfer/comm/pcie_ipc_tuning.py:default_cache_path is a folder of FLASHINFER_WORKSPACE_BASE."""
    from pathlib import Path

    env = kernels.environment(Path(str(tmp_path)), [120])
    assert env["FLASHINFER_WORKSPACE_BASE"] == str(kernels.directory(Path(str(tmp_path))))


def test_a_goal_that_does_not_exist_is_refused() -> None:
    from entrypoint.errors import Stop

    with pytest.raises(Stop):
        settings.load({"RELAUNCH_GOAL": "fast"}, {})
