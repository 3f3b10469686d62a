"""The CPU plan: what the rehearsal presets run, without any GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from entrypoint import plan
from entrypoint.checkpoint import model as checkpoint
from entrypoint.config import engine_flags, presets, settings
from entrypoint.errors import Stop
from entrypoint.host import inventory
from entrypoint.supervisor import preflight

BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 384,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
    "num_attention_heads": 12,
    "num_hidden_layers": 6,
    "vocab_size": 30522,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 256,
    "vocab_size": 512,
}
BOX = inventory.Inventory(host_memory_bytes=16 << 30)


def made(tmp_path: Path, config: dict[str, object], **environ: str) -> plan.Plan:
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = settings.load({f"RELAUNCH_{k}": v for k, v in {"MODEL": "x", **environ}.items()}, presets.read_all())
    return plan.make(loaded, BOX, checkpoint.read(tmp_path, model="x"))


def test_an_encoder_gets_the_flags_that_were_seen_to_work(tmp_path: Path) -> None:
    planned = made(tmp_path, BERT)
    assert planned.feasible and planned.is_embedding and planned.device == "cpu" and planned.per_gpu == ()
    assert " ".join(planned.flags) == (
        "--is-embedding --device cpu --attention-backend torch_native --cuda-graph-backend-decode disabled "
        "--cuda-graph-backend-prefill disabled --disable-overlap-schedule --disable-radix-cache "
        "--chunked-prefill-size -1 --mem-fraction-static 0.3 --max-total-tokens 4096 --max-running-requests 8 "
        "--enable-metrics --uvicorn-access-log-exclude-prefixes /metrics"
    )


def test_a_generating_model_keeps_its_radix_cache(tmp_path: Path) -> None:
    planned = made(tmp_path, GPT2, MAX_RUNNING_REQUESTS="3")
    assert not planned.is_embedding
    assert planned.max_total_tokens == 3 * 256
    assert "--disable-radix-cache" not in planned.flags and "--is-embedding" not in planned.flags


def test_engine_args_replace_the_plans_own_flags(tmp_path: Path) -> None:
    planned = made(tmp_path, BERT, ENGINE_ARGS="--max-total-tokens 2k --disable-cuda-graph --mem-fraction-static=0.2")
    assert planned.max_total_tokens == 2000 and planned.mem_fraction_static == 0.2
    assert planned.flags.count("--max-total-tokens") == 1 and planned.flags.count("--mem-fraction-static") == 1
    assert planned.flags[planned.flags.index("--max-total-tokens") + 1] == "2k"
    assert "--cuda-graph-backend-decode" not in planned.flags
    sources = {d.setting: d.source for d in planned.decisions}
    assert sources["max_total_tokens"] == "environment" and len(sources) == len(planned.decisions)


def test_what_healing_changed_wins_over_what_a_person_set(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    loaded = settings.load({"RELAUNCH_MODEL": "x", "RELAUNCH_MAX_RUNNING_REQUESTS": "8"}, {})
    changes = (
        plan.Change("max_running_requests", 8, 4, "the pool was too small"),
        plan.Change("--disable-flashinfer-autotune", None, True, "a bad tactic"),
        plan.Change("NCCL_P2P_DISABLE", None, "1", "a hang"),
    )
    planned = plan.make(loaded, BOX, checkpoint.read(tmp_path, model="x"), changes=changes)
    assert planned.max_running_requests == 4 and planned.env == {"NCCL_P2P_DISABLE": "1"}
    assert "--disable-flashinfer-autotune" in planned.flags
    reasons = {d.setting: d.reason for d in planned.decisions}
    assert reasons["max_running_requests"] == "the pool was too small"


def test_a_context_beyond_the_models_is_refused_with_one_that_fits(tmp_path: Path) -> None:
    planned = made(tmp_path, BERT, CONTEXT_LENGTH="1024")
    assert not planned.feasible and "CONTEXT_LENGTH=512 would fit" in planned.reasons[0]


def test_secrets_of_engine_args_are_refused_without_being_shown_or_hidden(tmp_path: Path) -> None:
    names = {flag.option for flag in engine_flags.table().values() if re.search("api_key|password|secret", flag.dest)}
    assert names
    for name in sorted(names):
        try:
            planned = made(tmp_path, GPT2, ENGINE_ARGS=f"{name} hush")
        except Stop as stop:
            assert "hush" not in stop.line()
        else:
            assert "hush" not in str(planned.decisions)


def on_the_host(tmp_path: Path, memory: int, config: dict[str, object], **environ: str) -> plan.Plan:
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = settings.load({f"RELAUNCH_{k}": v for k, v in {"MODEL": "x", **environ}.items()}, presets.read_all())
    box = inventory.Inventory(host_memory_bytes=memory)
    return plan.make(loaded, box, checkpoint.read(tmp_path, model="x"))


GLM = json.loads((Path(__file__).parent / "configs/glm-5-nvfp4.json").read_text())


@pytest.mark.parametrize("environ", [{"PRESET": "glm-5-nvfp4"}, {"DEVICE": "cuda"}, {}, {"DEVICE": "cpu"}])
def test_a_model_for_eight_gpus_is_refused_on_a_laptop_with_the_inventory_file_as_way_out(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    planned = on_the_host(tmp_path, 24 << 30, GLM, **environ)
    assert not planned.feasible and "RELAUNCH_GPU_INVENTORY=box.json" in planned.reasons[0]
    assert not any("would fit" in reason for reason in planned.reasons)


@pytest.mark.parametrize("environ", [{"PRESET": "glm-5-nvfp4", "MODEL": ""}, {"DEVICE": "cuda"}, {}])
def test_plan_and_serve_ask_for_gpus_alike(tmp_path: Path, environ: dict[str, str]) -> None:
    """A small model, so that memory has no say."""
    planned = on_the_host(tmp_path, 24 << 30, GPT2, **environ)
    loaded = settings.load({f"RELAUNCH_{k}": v for k, v in {"MODEL": "x", **environ}.items()}, presets.read_all())
    if planned.feasible:
        preflight.check(loaded, inventory.Inventory())
        return
    with pytest.raises(Stop) as caught:
        preflight.check(loaded, inventory.Inventory())
    assert caught.value.exit_code == 69 and "RELAUNCH_GPU_INVENTORY=box.json" in caught.value.next_step


def test_weights_and_pool_are_held_against_host_memory(tmp_path: Path) -> None:
    """GPT-2's table: 512 bytes a token (two layers, K and V, 64 values of two bytes)."""
    free = on_the_host(tmp_path, 0, GPT2)
    weights = checkpoint.read(tmp_path, model="x").bytes
    assert free.feasible and free.kv_bytes_per_token == 512 and weights > 0
    asked = {"ENGINE_ARGS": "--max-total-tokens 1000"}
    assert on_the_host(tmp_path, weights + 1000 * 512, GPT2, **asked).feasible
    refused = on_the_host(tmp_path, weights + 1000 * 512 - 1, GPT2, **asked)
    assert not refused.feasible and "more than the" in refused.reasons[0] and "would fit" in refused.reasons[0]


def test_the_reason_for_the_pool_says_which_limit_was_taken(tmp_path: Path) -> None:
    reasons = {}
    for tokens in (100, 512, 1 << 20):  # an eighth of host memory, in tokens
        planned = on_the_host(tmp_path, tokens * 512 * 8, GPT2)
        reasons[planned.max_total_tokens] = next(d.reason for d in planned.decisions if d.setting == "max_total_tokens")
    assert list(reasons) == [256, 512, 2048]
    assert reasons[256].startswith("one request of 256 tokens, which is more than an eighth")
    assert "limited to an eighth of host memory (512)" in reasons[512]
    assert reasons[2048].startswith("8 requests of 256 tokens; without")


@pytest.mark.parametrize("preset", ["rehearsal", "rehearsal-generate"])
def test_the_rehearsal_presets_are_for_the_cpu(preset: str) -> None:
    loaded = settings.load({"RELAUNCH_PRESET": preset}, presets.read_all())
    assert loaded.settings.device == "cpu"
    assert presets.describe(presets.read_all()[preset])


@pytest.mark.parametrize("text", ["--tp-size", "--context-length many", "--no-such-flag 1"])
def test_engine_args_that_make_no_sense_stop_in_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(Stop) as stop:
        made(tmp_path, BERT, ENGINE_ARGS=text)
    assert stop.value.exit_code == 78 and "\n" not in stop.value.line()
