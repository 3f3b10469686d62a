"""What must hold for every box and every wish."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from planned import GIB, adds_up, h200, make, read, rtx

from entrypoint.errors import Stop

MODELS = st.sampled_from(
    [
        "glm-5-nvfp4",
        "glm-5.2-nvfp4",
        "qwen3-30b-a3b",
        "gpt-oss-20b",
        "qwen3.5-12-layers",
        "minimax-m2-8-layers",
        "llama-8b",
        "deepseek-v3-8-layers",
    ]
)
CARDS = st.integers(16 * GIB, 300 * GIB)
FEW = settings(max_examples=25, deadline=None, derandomize=True)
WISHES: dict[str, st.SearchStrategy[Any]] = {
    "CONTEXT_LENGTH": st.sampled_from([2048, 32768]),
    "MAX_RUNNING_REQUESTS": st.integers(1, 200),
    "CHUNKED_PREFILL_SIZE": st.sampled_from([512, 2048, 8192]),
    "CUDA_GRAPH_MAX_BS": st.integers(0, 64),
    "MEM_FRACTION_STATIC": st.floats(0.3, 0.97).map(lambda x: round(x, 3)),
    "KV_CACHE_DTYPE": st.sampled_from(["fp8_e4m3", "bfloat16"]),
}


@FEW
@given(MODELS, CARDS, st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_the_lines_add_up_and_a_feasible_plan_fits(model: str, total: int, count: int, sm120: bool) -> None:
    planned = make(model, (rtx if sm120 else h200)(count, total=total))
    if planned.feasible:
        assert adds_up(planned)
        for account, gpu in zip(planned.per_gpu, planned.gpus, strict=True):
            assert account.load_peak_bytes <= gpu["total_bytes"]
            assert account.free_bytes is not None and account.free_bytes >= 0
            assert account.margin_bytes == GIB
        assert (
            planned.max_total_tokens and planned.context_length and planned.context_length <= planned.max_total_tokens
        )
    else:
        assert planned.reasons


@FEW
@given(MODELS, CARDS, st.integers(1, 40 * GIB), st.sampled_from([1, 4, 8]))
def test_more_memory_never_serves_fewer_requests_or_takes_smaller_steps(
    model: str, total: int, more: int, count: int
) -> None:
    """Tokens may be fewer: a bigger card has more graphs, and uses the rest of its pool better. Where the engine's own
    step doubles with the card, its activations may cost a few requests."""
    small, big = (make(model, rtx(count, total=size)) for size in (total, total + more))
    if small.feasible:
        assert big.feasible
        assert big.chunked_prefill_size and small.chunked_prefill_size
        assert big.chunked_prefill_size >= small.chunked_prefill_size
        if big.chunked_prefill_size == small.chunked_prefill_size:
            assert (big.max_running_requests or 0) >= (small.max_running_requests or 0)


@FEW
@given(MODELS, CARDS, st.integers(0, 8 * GIB), st.integers(0, 8 * GIB))
def test_a_bigger_margin_never_plans_more(model: str, total: int, one: int, other: int) -> None:
    low, high = sorted((one, other))
    tight, wide = (make(model, h200(8, total=total), MEMORY_MARGIN=margin) for margin in (low, high))
    if wide.feasible:
        assert tight.feasible and (wide.max_total_tokens or 0) <= (tight.max_total_tokens or 0)


@FEW
@given(MODELS)
def test_eight_ranks_never_need_more_per_gpu_than_four(model: str) -> None:
    eight, four = (make(model, rtx(8, total=400 * GIB), TP=tp) for tp in (8, 4))
    if eight.feasible and four.feasible:
        assert eight.per_gpu[0].weights_bytes <= four.per_gpu[0].weights_bytes
        assert (eight.kv_bytes_per_token or 0) <= (four.kv_bytes_per_token or 0)


@FEW
@given(MODELS, st.fixed_dictionaries({}, optional=WISHES))
def test_what_a_person_set_survives(model: str, constraints: dict[str, Any]) -> None:
    planned = make(model, rtx(), **constraints)
    for name, value in constraints.items():
        assert getattr(planned, name.lower()) == value, name
    sources = {decision.setting: decision.source for decision in planned.decisions}
    assert all(sources[name.lower()] == "environment" for name in constraints)
    assert len(sources) == len(planned.decisions)


@FEW
@given(
    st.dictionaries(
        st.sampled_from(
            [*read("glm-5-nvfp4").config, "num_experts", "layer_types", "sliding_window", "rope_scaling", "text_config"]
        ),
        st.one_of(
            st.none(),
            st.integers(-3, 500_000),
            st.just(10**400),
            st.text(max_size=5),
            st.lists(st.integers(0, 3), max_size=3),
            st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
        ),
        max_size=6,
    ),
    st.sampled_from(["GlmMoeDsaForCausalLM", "NeverHeardOfForCausalLM", "", "GptOssForCausalLM", "GPT2LMHeadModel"]),
)
def test_no_config_crashes_the_planner(broken: dict[str, Any], architecture: str) -> None:
    from entrypoint.checkpoint import model as checkpoint

    config = {**read("glm-5-nvfp4").config, **broken, "architectures": [architecture]}
    try:
        found = checkpoint.assemble(config, {}, None, model="x", revision=None, path=None)
    except Stop as stop:
        assert stop.exit_code == 66 and "lacks" in stop.line()
        return
    planned = make(found, rtx())
    assert planned.feasible or planned.reasons
