"""What the engine's own code refuses is refused, with what it takes instead; what it takes is not refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planned import GIB, h200, make, read, rtx

from entrypoint.checkpoint import engine_models
from entrypoint.checkpoint import model as checkpoint
from entrypoint.plan import sharding
from entrypoint.plan.sharding import Parallel

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def in_blocks() -> checkpoint.Checkpoint:
    """Experts of width 1,536 in FP8 blocks: 192 a rank over eight."""
    config = {**read("minimax-m2-8-layers").config, "quantization_config": BLOCKS}
    return checkpoint.assemble(config, {}, None, model="x", revision=None, path=None)


def test_experts_that_an_fp8_block_does_not_divide_go_whole_to_the_ranks() -> None:
    planned = make(in_blocks(), rtx(8))
    assert planned.feasible and planned.parallel["tp"] == 8 and planned.parallel["ep"] == 8
    assert next(d for d in planned.decisions if d.setting == "ep").reason.startswith("whole experts on each rank")


def test_an_expert_split_that_the_engine_refuses_is_refused_with_the_one_that_it_takes() -> None:
    planned = make(in_blocks(), rtx(8), TP=8, EP=1)
    assert not planned.feasible
    assert (
        "192 wide, no multiple of the FP8 block of 128" in planned.reasons[0] and "EP=8 would fit" in planned.reasons[0]
    )


def test_a_fraction_above_the_plans_own_is_the_operators_choice_until_the_account_cannot_stand() -> None:
    own = make("llama-8b", h200(1)).mem_fraction_static
    assert own is not None
    bold = make("llama-8b", h200(1), MEM_FRACTION_STATIC=round(own + 0.02, 3))
    assert bold.feasible and any("of margin" in warning for warning in bold.warnings)
    assert bold.chunked_prefill_size == 8192  # the fraction decides the pool, not the prefill step
    assert not make("llama-8b", h200(1), MEM_FRACTION_STATIC=0.999).feasible


@pytest.mark.parametrize("model", ["llama-8b", "qwen3-30b-a3b", "gpt-oss-20b", "minimax-m2-8-layers"])
def test_an_attention_backend_is_named_only_when_it_was_asked_for(model: str) -> None:
    assert "--attention-backend" not in make(model, rtx(1)).flags
    assert "--attention-backend" in make(model, rtx(1), ATTENTION_BACKEND="triton").flags


def test_replicas_need_gpus_of_their_own_and_attention_groups_do_not() -> None:
    wide = make("llama-8b", rtx(8), TP=8, ENGINE_ARGS="--dp-size 8")
    assert not wide.feasible and "8 engines of 8 GPUs each" in wide.reasons[0]
    groups = make("llama-8b", rtx(8), ENGINE_ARGS="--enable-dp-attention --dp-size 8")
    assert groups.parallel["dp_attention"] == 8
    assert groups.per_gpu == make("llama-8b", rtx(8), DP_ATTENTION=8).per_gpu


def test_mig_slices_are_planned_one_at_a_time() -> None:
    box = rtx(2)
    slices = replace(box, gpus=tuple(replace(gpu, name=f"{gpu.name} MIG 3g.40gb") for gpu in box.gpus))
    assert make("llama-8b", slices).parallel["tp"] == 1
    assert "MIG" in make("llama-8b", slices, TP=2).reasons[0]


def test_a_quantisation_that_is_not_the_checkpoints_is_refused() -> None:
    planned = make(in_blocks(), rtx(8), QUANTIZATION="awq")
    assert not planned.feasible and "the checkpoint is fp8" in planned.reasons[0]


def test_sizes_that_a_config_leaves_out_are_those_of_its_class() -> None:
    config = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 34}
    assert engine_models.completed(config)["head_dim"] == 256
    assert engine_models.completed({"model_type": "gpt2", "n_positions": 512}).get("max_position_embeddings") is None
    found = checkpoint.assemble({**config, "hidden_size": 2560}, {}, None, model="x", revision=None, path=None)
    assert make(found, rtx(1)).context_length == 131072


def test_an_attention_group_holds_the_whole_embedding_and_a_share_of_the_head() -> None:
    found = read("deepseek-v3-8-layers")
    from entrypoint.checkpoint import geometry

    g = geometry.of(found.config, found.architecture)
    apart = sharding.share(found.groups, g, Parallel(8, dp=8), 0, sm=90).tensors
    head = sharding.share(found.groups, g, Parallel(8, dp=8, dp_lm_head=True), 0, sm=90).tensors
    assert head - apart == pytest.approx(2 * g.vocab * g.hidden * 7 / 8, rel=0.001)


def test_float32_weighs_and_caches_twice_as_much() -> None:
    half, full = make("llama-8b", rtx(1)), make("llama-8b", rtx(1), ENGINE_ARGS="--dtype float32")
    assert full.per_gpu[0].weights_bytes > 1.95 * half.per_gpu[0].weights_bytes
    assert full.kv_bytes_per_token == 2 * (half.kv_bytes_per_token or 0)


def test_a_card_without_room_for_the_rule_of_thumb_still_serves_a_few_requests() -> None:
    planned = make("llama-8b", rtx(1, total=19 * GIB))
    assert planned.feasible and planned.max_total_tokens and planned.max_running_requests
    assert planned.max_running_requests <= 4


def test_pools_that_the_host_cannot_pin_are_refused() -> None:
    small = replace(rtx(8), host_memory_bytes=256 * GIB)
    asked = "--enable-hierarchical-cache --hicache-size 64"
    planned = make("llama-8b", small, ENGINE_ARGS=asked)
    assert not planned.feasible and planned.reasons[0].startswith("--hicache-size: 8 ranks pin")
    fine = make("llama-8b", rtx(8), ENGINE_ARGS=asked)
    assert fine.feasible and fine.host == {"memory_bytes": 1 << 40, "pools_bytes": 8 * 64 * 10**9}
