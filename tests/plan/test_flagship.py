"""8x RTX PRO 6000 with GLM-5-NVFP4: capacity, the seed failure, kernels, and what is refused."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from planned import GIB, adds_up, h200, make, read, rtx

from entrypoint import plan
from entrypoint.config import presets, settings
from entrypoint.errors import Stop


def flagship(goal: str = "context") -> plan.Plan:
    loaded = settings.load({"RELAUNCH_PRESET": "glm-5-nvfp4", "RELAUNCH_GOAL": goal}, presets.read_all())
    return plan.make(loaded, rtx(), read("glm-5-nvfp4"))


def test_the_flagship_holds_a_quarter_more_than_the_engines_default() -> None:
    planned = flagship()
    assert planned.feasible and adds_up(planned)
    pre = (planned.gpus[0]["total_bytes"] - planned.per_gpu[0].baseline_bytes) / GIB
    weights = planned.per_gpu[0].weights_bytes / GIB
    default = (pre * 0.833 - weights) * GIB / 61_464
    assert planned.max_total_tokens and planned.max_total_tokens >= 1.25 * default
    assert planned.chunked_prefill_size and planned.chunked_prefill_size >= 4096
    assert planned.max_running_requests and planned.max_running_requests >= 32
    reasons = {d.setting: d.reason for d in planned.decisions}
    assert "8192" in reasons["chunked_prefill_size"] and "at equal chunk" in reasons["chunked_prefill_size"]


def test_the_flagships_slack_covers_what_the_engine_would_set_aside() -> None:
    """memory_hook.py for chunk 4096, 64 graphs, TP8, no prefill graphs, with its 10 GiB floor."""
    planned = flagship()
    assert planned.mem_fraction_static is not None
    assert planned.mem_fraction_static <= (97887 - 10 * 1024) / 97887


def test_the_seed_failure_is_refused_with_the_number_that_works() -> None:
    planned = make("glm-5-nvfp4", rtx(), MEM_FRACTION_STATIC=0.95, MAX_RUNNING_REQUESTS=8)
    assert not planned.feasible
    assert (
        "MEM_FRACTION_STATIC=0.95" in planned.reasons[0] and "MEM_FRACTION_STATIC=0.864 would fit" in planned.reasons[0]
    )
    assert make("glm-5-nvfp4", rtx(), MEM_FRACTION_STATIC=0.895).feasible
    assert make("glm-5-nvfp4", rtx(), MEM_FRACTION_STATIC=0.88, MAX_RUNNING_REQUESTS=64).feasible


@pytest.mark.parametrize(
    ("constraints", "words"),
    [
        ({"TP": 4}, ["weights need", "TP=8 would fit"]),
        ({"TP": 16}, ["TP=16", "16 GPUs", "TP=8 would fit"]),
        ({"TP": 3}, ["TP=3", "TP=8 would fit"]),
        ({"EP": 3}, ["EP=3", "EP=1 would fit"]),
        ({"EP": 2}, ["EP=1 would fit"]),
        ({"CONTEXT_LENGTH": 300_000}, ["CONTEXT_LENGTH=202752 would fit"]),
        ({"KV_CACHE_DTYPE": "fp8_e5m2"}, ["KV_CACHE_DTYPE=fp8_e4m3"]),
        ({"MOE_RUNNER_BACKEND": "flashinfer_trtllm"}, ["flashinfer_cutlass"]),
        ({"ENGINE_ARGS": "--dsa-decode-backend trtllm"}, ["flashinfer_sparse_mla"]),
        ({"CHUNKED_PREFILL_SIZE": 5000}, ["page size 64", "CHUNKED_PREFILL_SIZE=4992 would fit"]),
        ({"MEM_FRACTION_STATIC": 0.5}, ["leave no room", "MEM_FRACTION_STATIC=auto"]),
        ({"CHUNKED_PREFILL_SIZE": 16384, "MEM_FRACTION_STATIC": 0.9}, ["MEM_FRACTION_STATIC=0.864 would fit"]),
    ],
)
def test_what_cannot_be_is_refused_with_the_smallest_change(constraints: dict[str, object], words: list[str]) -> None:
    planned = make("glm-5-nvfp4", rtx(), **constraints)
    assert not planned.feasible
    text = "; ".join(planned.reasons)
    for word in words:
        assert word in text, text


def test_a_context_that_the_pool_cannot_hold_names_one_that_it_can() -> None:
    planned = make("glm-5.2-nvfp4", rtx(), CONTEXT_LENGTH=1_000_000)
    assert not planned.feasible and "CONTEXT_LENGTH=" in planned.reasons[0]
    context = int(planned.reasons[0].split("CONTEXT_LENGTH=")[2].split()[0])
    assert make("glm-5.2-nvfp4", rtx(), CONTEXT_LENGTH=context).feasible


def test_an_occupied_gpu_is_named() -> None:
    from dataclasses import replace

    box = rtx()
    gpus = (replace(box.gpus[0], free_bytes=60 * GIB), *box.gpus[1:])
    planned = make("glm-5-nvfp4", replace(box, gpus=gpus))
    assert not planned.feasible and "free the fullest GPU" in planned.reasons[0]


def test_kernels_of_sm120_are_said_outright() -> None:
    flags = " ".join(flagship().flags)
    for text in (
        "--quantization modelopt_fp4",
        "--moe-runner-backend flashinfer_cutlass",
        "--dsa-decode-backend flashinfer_sparse_mla",
        "--dsa-prefill-backend flashinfer_sparse_mla",
        "--kv-cache-dtype fp8_e4m3",
        "--disable-shared-experts-fusion",
        "--disable-custom-all-reduce",
        "--tp-size 8",
        "--enable-metrics",
        "--reasoning-parser glm45",
    ):
        assert text in flags
    other = make("glm-5-8-layers", h200())
    assert other.kv_cache_dtype == "bfloat16" and "--dsa-decode-backend" not in other.flags


def test_shared_experts_that_are_quantised_too_stay_fused() -> None:
    from entrypoint.checkpoint import model as checkpoint

    config = dict(read("glm-5-nvfp4").config)
    quantised = {
        **config["quantization_config"],
        "ignore": ["lm_head", "model.layers.*.self_attn*", "model.layers.78*"],
    }
    found = checkpoint.assemble(
        {**config, "quantization_config": quantised}, {}, None, model="x", revision=None, path=None
    )
    assert "--disable-shared-experts-fusion" not in make(found, rtx()).flags


def test_mtp_is_planned_or_refused_by_what_the_checkpoint_has() -> None:
    with_mtp, without = make("glm-5-nvfp4", rtx(), SPECULATIVE="mtp"), make("glm-5-8-layers", h200(), SPECULATIVE="mtp")
    assert with_mtp.feasible and "NEXTN" in with_mtp.flags
    assert with_mtp.per_gpu[0].weights_bytes > flagship().per_gpu[0].weights_bytes + 2 * GIB
    assert not without.feasible and "SPECULATIVE=off" in without.reasons[0]


@pytest.mark.parametrize("preset", sorted(set(presets.read_all()) - {"rehearsal", "rehearsal-generate"}))
def test_presets_load_say_what_they_are_and_comment_every_line(preset: str) -> None:
    text = presets.read_all()[preset]
    assert settings.load({"RELAUNCH_PRESET": preset}, presets.read_all()).settings.model
    assert presets.describe(text).endswith(".")
    lines = [line for line in text.splitlines() if line]
    assert all(before.startswith("#") for before, line in pairwise(lines) if not line.startswith("#"))


def test_an_architecture_that_the_engine_has_no_class_for_is_refused() -> None:
    from entrypoint.checkpoint import model as checkpoint

    config = {**read("qwen3-30b-a3b").config, "architectures": ["NeverHeardOfForCausalLM"]}
    found = checkpoint.assemble(config, {}, None, model="x", revision=None, path=None)
    planned = make(found, h200())
    assert not planned.feasible and "NeverHeardOfForCausalLM is no class" in planned.reasons[0]


def test_an_unknown_architecture_is_planned_cautiously_and_said_so() -> None:
    from entrypoint.checkpoint import model as checkpoint

    config = {**read("qwen3-30b-a3b").config, "architectures": ["BloomForCausalLM"]}
    found = checkpoint.assemble(config, {}, None, model="x", revision=None, path=None)
    planned = make(found, h200())
    assert planned.feasible and any("not known well enough" in warning for warning in planned.warnings)
    assert planned.per_gpu[0].weights_bytes >= make("qwen3-30b-a3b", h200()).per_gpu[0].weights_bytes


def test_the_terminal_view_fits_80_columns_and_needs_no_colour() -> None:
    import io

    from rich.console import Console

    from entrypoint.ui import plan_text

    for planned in (flagship(), make("glm-5-nvfp4", rtx(), TP=4)):
        out = io.StringIO()
        document = planned.document(["python", "-m", "sglang.launch_server", *planned.flags], {})
        Console(file=out, width=80, no_color=True).print(plan_text.render(document))
        text = out.getvalue()
        assert max(map(len, text.splitlines())) <= 80
        assert "GPU 7" in text or "GPU 3" in text
        assert "▓" in text or "does not fit" in text


def test_overrides_of_the_config_are_in_the_account() -> None:
    pattern = "F" + "S" * 77
    asked = "--json-model-override-args '" + json.dumps({"index_topk_pattern": pattern}) + "'"
    planned = make("glm-5-nvfp4", rtx(), ENGINE_ARGS=asked)
    assert planned.kv_bytes_per_token == 78 * 656 + 132
    with pytest.raises(Stop):
        make("glm-5-nvfp4", rtx(), ENGINE_ARGS="--json-model-override-args nonsense")


def test_flags_that_the_account_cannot_follow_are_named() -> None:
    planned = make("glm-5-nvfp4", rtx(), ENGINE_ARGS="--cpu-offload-gb 4")
    assert any("--cpu-offload-gb" in warning for warning in planned.warnings)


def test_an_encoder_on_a_gpu_and_cuda_without_gpus() -> None:
    from entrypoint.checkpoint import model as checkpoint
    from entrypoint.host import inventory

    bert = {
        "architectures": ["BertModel"],
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "max_position_embeddings": 512,
        "vocab_size": 30522,
    }
    found = checkpoint.assemble(bert, {}, None, model="x", revision=None, path=None)
    planned = make(found, h200())
    assert planned.feasible and planned.is_embedding and planned.chunked_prefill_size == -1
    assert "--disable-radix-cache" in planned.flags and "--is-embedding" in planned.flags
    nowhere = make(found, inventory.Inventory(), DEVICE="cuda")
    assert not nowhere.feasible and "DEVICE=cpu" in nowhere.reasons[0] and nowhere.per_gpu == ()


def test_one_setting_has_one_flag_whoever_gives_it() -> None:
    arguments = (
        "--tp 8 --mem-fraction-static 0.88 --kv-cache-dtype bfloat16 --quantization modelopt_fp4 --load-format dummy"
    )
    planned = make("glm-5-nvfp4", rtx(), ENGINE_ARGS=arguments)
    options = [word for word in planned.flags if word.startswith("--")]
    from entrypoint.config import engine_flags

    dests = [engine_flags.table()[option].dest for option in options]
    assert len(dests) == len(set(dests))
    assert planned.mem_fraction_static == 0.88 and planned.kv_bytes_per_token == 100_152
