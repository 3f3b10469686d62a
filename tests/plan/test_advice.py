"""What a refusal says would fit is planned here once more, as a person would set it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import make, rtx

from entrypoint import plan


def followed(model: str, constraints: dict[str, Any]) -> tuple[plan.Plan, list[plan.Plan]]:
    """The refused plan, and one for each change that it names."""
    refused = make(model, rtx(), **constraints)
    assert not refused.feasible
    plans = []
    for reason in refused.reasons:
        if not reason.endswith(" would fit"):
            continue
        for change in reason.removesuffix(" would fit").rpartition(": ")[2].split("; or "):
            given = dict(constraints)
            for one in change.split(" with "):
                if one.startswith("removing "):
                    given.pop("ENGINE_ARGS")
                elif one.startswith("--"):
                    given["ENGINE_ARGS"] = one.removesuffix(" in ENGINE_ARGS")
                else:
                    name, _, value = one.partition("=")
                    given[name] = value
            plans.append(make(model, rtx(), **given))
    return refused, plans


@pytest.mark.parametrize(
    "constraints",
    [
        {"TP": 3},
        {"TP": 5},
        {"TP": 4},
        {"TP": 16},
        {"PP": 100},
        {"TP": 8, "PP": 2},
        {"CONTEXT_LENGTH": 10_000_000},
        {"CONTEXT_LENGTH": 10_000_000, "TP": 3, "MEM_FRACTION_STATIC": 0.97},
        {"EP": 3, "KV_CACHE_DTYPE": "fp8_e5m2"},
        {"MAX_RUNNING_REQUESTS": 100_000},
        {"CUDA_GRAPH_MAX_BS": 100_000},
        {"MAX_RUNNING_REQUESTS": 100_000, "CUDA_GRAPH_MAX_BS": 100_000},
        {"CHUNKED_PREFILL_SIZE": 1 << 20},
        {"MEM_FRACTION_STATIC": 0.5},
        {"MEM_FRACTION_STATIC": 0.97, "CHUNKED_PREFILL_SIZE": 16384},
        {"MEMORY_MARGIN": "60GiB"},
        {"ENGINE_ARGS": "--mem-fraction-static 0.5"},
        {"ENGINE_ARGS": "--mem-fraction-static 0.95"},
        {"ENGINE_ARGS": "--dsa-decode-backend trtllm"},
        {"ENGINE_ARGS": "--tp-size 3"},
        {"NNODES": 3, "TP": 8, "PP": 2},
        {"NNODES": 2, "TP": 4, "PP": 3},
        {"NNODES": 2, "TP": 16, "PP": 2},
        {"NNODES": 5, "TP": 3},
        {"NNODES": 2, "PP": 2, "SPECULATIVE": "mtp"},
        {"NNODES": 2, "PP": 2, "ENGINE_ARGS": "--min-free-slots-delay 2"},
        {"NNODES": 2, "ENGINE_ARGS": "--dp-size 2"},
        {"NNODES": 3, "PP": 2, "SPECULATIVE": "mtp", "CONTEXT_LENGTH": 10_000_000},
    ],
    ids=str,
)
def test_what_is_said_to_fit_does(constraints: dict[str, Any]) -> None:
    refused, plans = followed("glm-5-nvfp4", constraints)
    assert plans, refused.reasons
    assert all(planned.feasible for planned in plans), refused.reasons


@pytest.mark.parametrize("name", ["MAX_RUNNING_REQUESTS", "CUDA_GRAPH_MAX_BS"])
def test_the_setting_that_ate_the_memory_is_named_with_what_it_takes(name: str) -> None:
    reasons = make("glm-5-nvfp4", rtx(), **{name: 100_000}).reasons
    assert re.search(rf"{name}=100000 takes [0-9.]+ GiB more per GPU: {name}=\d+ would fit", reasons[-1]), reasons


def test_a_fraction_given_in_engine_args_is_to_be_removed_there() -> None:
    reasons = make("glm-5-nvfp4", rtx(), ENGINE_ARGS="--mem-fraction-static 0.5").reasons
    assert "removing --mem-fraction-static from ENGINE_ARGS would fit" in reasons[-1]


@pytest.mark.parametrize("chunk", [2048, 8192, 16384])
def test_what_the_plan_would_choose_itself_is_taken_when_a_person_says_it(chunk: int) -> None:
    computed = make("glm-5-nvfp4", rtx(), CHUNKED_PREFILL_SIZE=chunk)
    said = make("glm-5-nvfp4", rtx(), CHUNKED_PREFILL_SIZE=chunk, MEM_FRACTION_STATIC=computed.mem_fraction_static)
    assert computed.feasible and said.feasible, said.reasons


def test_many_wrong_wishes_together_still_get_a_way_out() -> None:
    constraints = {"CONTEXT_LENGTH": 10**8, "MEM_FRACTION_STATIC": 0.01, "ATTENTION_BACKEND": "fa3", "EP": 3, "TP": 16}
    refused, plans = followed("llama-8b", constraints)
    assert plans and all(planned.feasible for planned in plans), refused.reasons


def test_no_change_is_named_when_none_is_enough() -> None:
    refused = make("glm-5-nvfp4", rtx(2))
    assert not refused.feasible and all("would fit" not in r or "on 8 GPUs" in r for r in refused.reasons)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.sampled_from(["glm-5-nvfp4", "llama-8b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3-8-layers"]),
    st.fixed_dictionaries(
        {},
        optional={
            "TP": st.integers(1, 20),
            "PP": st.integers(1, 9),
            "NNODES": st.integers(1, 4),
            "EP": st.integers(1, 9),
            "DP_ATTENTION": st.integers(1, 9),
            "CONTEXT_LENGTH": st.sampled_from([1, 5000, 10**6, 10**8]),
            "MAX_RUNNING_REQUESTS": st.sampled_from([1, 300, 10**5, 10**8]),
            "CUDA_GRAPH_MAX_BS": st.sampled_from([0, 300, 10**6]),
            "CHUNKED_PREFILL_SIZE": st.sampled_from([-1, 100, 4096, 10**6]),
            "MEM_FRACTION_STATIC": st.sampled_from([0.01, 0.5, 0.999]),
            "KV_CACHE_DTYPE": st.sampled_from(["fp8_e5m2", "bfloat16", "nvfp4"]),
            "ATTENTION_BACKEND": st.sampled_from(["fa3", "triton", "trtllm_mla"]),
            "SPECULATIVE": st.just("mtp"),
            "ENGINE_ARGS": st.sampled_from(["--tp-size 5", "--mem-fraction-static 0.4", "--context-length 5000000"]),
        },
    ),
)
def test_whatever_is_wished_what_is_said_to_fit_does(model: str, constraints: dict[str, Any]) -> None:
    if make(model, rtx(), **constraints).feasible:
        return
    refused, plans = followed(model, constraints)
    assert all(planned.feasible for planned in plans), refused.reasons
