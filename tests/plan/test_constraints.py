"""Values that no plan can be made with are refused with the variable and the way out, whoever gave them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planned import GIB, h200, make, rtx

from entrypoint import plan
from entrypoint.errors import Stop


def refused(**constraints: object) -> str:
    with pytest.raises(Stop) as stop:
        make("llama-8b", rtx(), **constraints)
    assert stop.value.exit_code == 78 and stop.value.cause == "config_rejected"
    return stop.value.line()


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("ATTENTION_BACKEND", "flashinfer"),
        ("MOE_RUNNER_BACKEND", "flashinfer_cutlass"),
        ("FP4_GEMM_BACKEND", "flashinfer_cudnn"),
        ("QUANTIZATION", "modelopt_fp4"),
        ("KV_CACHE_DTYPE", "fp8_e4m3"),
    ],
)
def test_a_word_that_the_engine_does_not_know_is_refused_with_those_it_knows(name: str, choice: str) -> None:
    line = refused(**{name: "nonsense"})
    assert f"RELAUNCH_{name}=nonsense" in line and choice in line and "auto" in line
    assert make("llama-8b", rtx(), **{name: "auto"}).feasible


@pytest.mark.parametrize(
    "option",
    [
        "tp-size",
        "pp-size",
        "ep-size",
        "attn-dp-size",
        "context-length",
        "max-running-requests",
        "max-total-tokens",
        "chunked-prefill-size",
        "mem-fraction-static",
        "page-size",
        "max-mamba-cache-size",
        "swa-full-tokens-ratio",
        "mamba-full-memory-ratio",
    ],
)
@pytest.mark.parametrize("value", ["0", "-2"])
def test_numbers_in_engine_args_that_divide_nothing_are_refused(option: str, value: str) -> None:
    assert f"--{option}" in refused(ENGINE_ARGS=f"--{option} {value}")


@pytest.mark.parametrize("value", ["1" + "0" * 400, "nan", "inf", "1e999"])
@pytest.mark.parametrize("option", ["mem-fraction-static", "mamba-full-memory-ratio"])
def test_numbers_beyond_all_measure_are_refused(option: str, value: str) -> None:
    refused(ENGINE_ARGS=f"--{option} {value}")


@pytest.mark.parametrize("name", ["TP", "CONTEXT_LENGTH", "MAX_RUNNING_REQUESTS", "CUDA_GRAPH_MAX_BS"])
def test_settings_beyond_all_measure_are_refused_or_planned_at_once(name: str) -> None:
    assert f"RELAUNCH_{name}" in refused(**{name: 10**30})
    assert not make("llama-8b", rtx(), **{name: 2**31 - 1 if name != "TP" else 4096}).feasible


@pytest.mark.parametrize("value", [0, -5])
def test_a_prefill_step_of_nothing_is_refused(value: int) -> None:
    refused(CHUNKED_PREFILL_SIZE=value)


def test_engine_args_win_over_the_setting_of_the_same_flag() -> None:
    planned = make("glm-5-nvfp4", rtx(), ENGINE_ARGS="--fp4-gemm-backend flashinfer_cudnn")
    assert planned.fp4_gemm_backend == "flashinfer_cudnn"


@pytest.mark.parametrize("total", [0, 1, 10**30])
def test_cards_of_impossible_sizes_end_in_a_plan(total: int) -> None:
    box = rtx()
    gpus = tuple(replace(gpu, total_bytes=total, free_bytes=total) for gpu in box.gpus)
    planned: plan.Plan = make("llama-8b", replace(box, gpus=gpus))
    assert planned.feasible or planned.reasons


@pytest.mark.parametrize("text", ["[" * 100_000, '{"num_hidden_layers": null}'])
def test_overrides_that_leave_no_model_are_refused(text: str) -> None:
    refused(ENGINE_ARGS=f"--json-model-override-args '{text}'")


@pytest.mark.parametrize(
    ("model", "sm120", "constraints", "refused"),
    [
        ("llama-8b", True, {"ATTENTION_BACKEND": "fa3"}, True),
        ("llama-8b", False, {"ATTENTION_BACKEND": "fa3"}, False),
        ("llama-8b", False, {"ATTENTION_BACKEND": "flashmla"}, True),
        ("llama-8b", False, {"ATTENTION_BACKEND": "aiter"}, True),
        ("llama-8b", True, {"ATTENTION_BACKEND": "trtllm_mha", "KV_CACHE_DTYPE": "fp8_e4m3"}, True),
        ("llama-8b", True, {"ENGINE_ARGS": "--decode-attention-backend flashmla"}, True),
        ("llama-8b", False, {"KV_CACHE_DTYPE": "nvfp4"}, True),
        ("deepseek-v3-8-layers", True, {"ATTENTION_BACKEND": "flashmla"}, True),
        ("deepseek-v3-8-layers", True, {"ATTENTION_BACKEND": "trtllm_mla"}, True),
        ("deepseek-v3-8-layers", False, {"ATTENTION_BACKEND": "flashmla"}, False),
        ("qwen3-30b-a3b", True, {"MOE_RUNNER_BACKEND": "flashinfer_trtllm"}, True),
        ("qwen3-30b-a3b", True, {"MOE_RUNNER_BACKEND": "triton"}, False),
        ("glm-5-nvfp4", True, {"FP4_GEMM_BACKEND": "flashinfer_trtllm"}, True),
    ],
    ids=str,
)
def test_a_word_without_a_kernel_on_this_gpu_is_refused(
    model: str, sm120: bool, constraints: dict[str, object], refused: bool
) -> None:
    planned = make(model, rtx() if sm120 else h200(8), **constraints)
    assert planned.feasible is not refused, planned.reasons
    if refused:
        assert "kernels only for" in planned.reasons[0] or "does not read" in planned.reasons[0]
        assert planned.reasons[-1].endswith("would fit")


def test_what_runs_otherwise_than_asked_is_said() -> None:
    planned = make("glm-5-nvfp4", rtx(), ATTENTION_BACKEND="triton", ENGINE_ARGS="--page-size 16")
    text = " ".join(planned.warnings)
    assert "ATTENTION_BACKEND=triton" in text and "dsa" in text
    assert "--page-size 16" in text and "64" in text
    quiet = make("glm-5-nvfp4", rtx(), ATTENTION_BACKEND="dsa", ENGINE_ARGS="--page-size 64")
    assert not any("page-size" in w or "ATTENTION_BACKEND" in w for w in quiet.warnings)


def test_gpus_before_the_engines_kernels_are_named() -> None:
    box = rtx(2)
    old = replace(box, gpus=tuple(replace(gpu, sm=61, name="Tesla P40") for gpu in box.gpus))
    planned = make("llama-8b", old)
    assert not planned.feasible and "Tesla P40" in planned.reasons[0] and "SM 61" in planned.reasons[0]
    one = make("llama-8b", replace(box, gpus=(old.gpus[0], box.gpus[1])))
    assert not one.feasible and "CUDA_VISIBLE_DEVICES=1 would fit" in one.reasons[0]


@pytest.mark.parametrize("small", [0, 1])
def test_a_mixed_box_is_told_which_gpu_is_enough(small: int) -> None:
    box = rtx(2)
    gpus = list(box.gpus)
    gpus[small] = replace(gpus[small], name="small", sm=89, total_bytes=24 * GIB, free_bytes=23 * GIB)
    planned = make("qwen3-30b-a3b", replace(box, gpus=tuple(gpus)))
    assert not planned.feasible and planned.reasons[-1] == f"CUDA_VISIBLE_DEVICES={1 - small} would fit"
    assert any("different architectures" in warning and "SM 89" in warning for warning in planned.warnings)
