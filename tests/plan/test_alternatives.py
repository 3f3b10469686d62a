"""The kernels that healing may turn to."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planned import h200, make, rtx

from entrypoint.host import inventory


def b200() -> inventory.Inventory:
    return replace(h200(), gpus=tuple(replace(gpu, name="NVIDIA B200", sm=100) for gpu in h200().gpus))


@pytest.mark.parametrize(
    ("model", "box", "expected"),
    [
        (
            "glm-5-nvfp4",
            rtx(),
            {
                "attention_backend": ("flashinfer", "triton"),
                "moe_runner_backend": ("flashinfer_cutlass", "marlin"),
                "fp4_gemm_backend": ("flashinfer_cutlass", "flashinfer_cudnn", "marlin"),
            },
        ),
        (
            "glm-5-nvfp4",
            b200(),
            {
                "attention_backend": ("trtllm_mla", "flashinfer", "triton"),
                "moe_runner_backend": ("flashinfer_trtllm", "flashinfer_cutlass", "marlin"),
                "fp4_gemm_backend": ("flashinfer_trtllm", "flashinfer_cutlass", "flashinfer_cudnn", "marlin"),
            },
        ),
        ("llama-8b", h200(), {"attention_backend": ("fa3", "flashinfer", "triton")}),
        ("llama-8b", rtx(), {"attention_backend": ("flashinfer", "triton")}),
        (
            "qwen3-30b-a3b",
            h200(),
            {
                "attention_backend": ("fa3", "flashinfer", "triton"),
                "moe_runner_backend": ("triton",),
            },
        ),
    ],
)
def test_only_what_exists_on_this_gpu_for_this_model(
    model: str, box: inventory.Inventory, expected: dict[str, tuple[str, ...]]
) -> None:
    assert dict(make(model, box).alternatives) == expected


def test_each_is_taken_by_the_plan_itself() -> None:
    """None of them is one that the planner would refuse."""
    for setting, words in make("glm-5-nvfp4", rtx()).alternatives.items():
        for word in words:
            planned = make("glm-5-nvfp4", rtx(), **{setting.upper(): word})
            assert planned.feasible, (setting, word, planned.reasons)
