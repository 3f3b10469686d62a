"""One model over several boxes: who holds what, what is refused, what crosses the network, what it gives."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import CONFIGS, adds_up, h200, make, read, rtx
from rich.console import Console

from entrypoint import plan
from entrypoint.checkpoint import geometry
from entrypoint.checkpoint.engine_models import heads_everywhere
from entrypoint.config import loading
from entrypoint.errors import Stop
from entrypoint.plan import sharding
from entrypoint.plan.sharding import Parallel
from entrypoint.supervisor import planning
from entrypoint.ui import plan_text

TWO = make("glm-5-nvfp4", rtx(), NNODES=2, TP=8, PP=2)
ONE = make("glm-5-nvfp4", rtx())
MODELS = ["glm-5-nvfp4", "glm-5.2-nvfp4", "qwen3-30b-a3b", "gpt-oss-20b", "qwen3.5-12-layers", "llama-8b"]


def held(planned: plan.Plan) -> list[int]:
    """The layers of every stage in order; a stage over several boxes counts once."""
    stages = {stage["stage"]: stage["layers"] for node in planned.nodes for stage in node["stages"]}
    return [layer for stage in sorted(stages) for layer in range(stages[stage][0], stages[stage][1] + 1)]


def test_two_boxes_hold_half_of_the_layers_each() -> None:
    assert TWO.feasible and adds_up(TWO) and len(TWO.per_gpu) == 16 and len(TWO.gpus) == 8
    assert [(a.node, a.index) for a in TWO.per_gpu] == [(node, gpu) for node in (0, 1) for gpu in range(8)]
    first, last = (node["stages"][0] for node in TWO.nodes)
    assert (first["layers"], last["layers"]) == ([0, 38], [39, 77])
    assert (first["embedding"], first["lm_head"], last["embedding"], last["lm_head"]) == (True, False, False, True)
    assert first["tensor_ranks"] == last["tensor_ranks"] == [0, 7]
    # Three dense layers against three of experts.
    assert last["weights_bytes"] > first["weights_bytes"] > 0.4 * ONE.per_gpu[0].weights_bytes
    assert first["kv_bytes_per_token"] == last["kv_bytes_per_token"] == 39 * (656 + 132) == TWO.kv_bytes_per_token


def test_what_two_boxes_give_over_one_is_said() -> None:
    assert TWO.one_box is not None and ONE.one_box is None and ONE.network is None
    for name in ("max_total_tokens", "context_length", "max_running_requests", "kv_bytes_per_token"):
        assert TWO.one_box[name] == getattr(ONE, name), name
    assert TWO.max_total_tokens and ONE.max_total_tokens
    assert TWO.one_box["times"] == round(TWO.max_total_tokens / ONE.max_total_tokens, 2) > 3.5
    # Each stage decodes its own half of the requests, from the graphs of one box.
    assert (TWO.max_running_requests, TWO.cuda_graph_max_bs) == (128, 64)


def test_a_model_that_one_box_cannot_hold_says_so() -> None:
    planned = make("glm-5-nvfp4", rtx(4), NNODES=2)
    assert planned.feasible and planned.one_box is not None and not planned.one_box["feasible"]
    assert "weights need" in planned.one_box["reason"] and planned.one_box["max_total_tokens"] is None


def test_what_crosses_the_network() -> None:
    assert TWO.network is not None and TWO.network["tensor"] is None
    pipe = TWO.network["pipeline"]
    assert (pipe["boundaries"], pipe["bytes_per_token"]) == (1, 2 * 6144 * 2)  # hidden states and residual
    assert pipe["bytes_per_prefill_step"] == 8192 * pipe["bytes_per_token"] == 192 << 20
    assert pipe["bytes_per_decode_step"] == 64 * pipe["bytes_per_token"]
    wide = make("glm-5-nvfp4", rtx(), NNODES=2, TP=16)
    assert wide.feasible and wide.network is not None and wide.network["pipeline"] is None
    assert wide.network["tensor"]["all_reduces"] == 2 * 78
    assert wide.network["tensor"]["bytes_per_prefill_step"] == 2 * 78 * 8192 * 6144 * 2
    caution = next(warning for warning in wide.warnings if "TP=16 lies over 2 boxes" in warning)
    assert all(text in caution for text in ("156 all-reduces", "14.62 GiB", "TP=8 with PP=2", "192 MiB"))
    assert wide.max_total_tokens and TWO.max_total_tokens and TWO.max_total_tokens > 1.8 * wide.max_total_tokens


def test_indices_cross_where_a_stage_begins_with_a_layer_that_shares_them() -> None:
    g = geometry.of(read("glm-5.2-nvfp4").config, "GlmMoeDsaForCausalLM")
    for cut in ((39, 39), (38, 40), (40, 38)):
        text = ",".join(map(str, cut))
        planned = make("glm-5.2-nvfp4", rtx(), NNODES=2, passed={"SGLANG_PP_LAYER_PARTITION": text})
        assert planned.network is not None and held(planned) == list(range(78))
        more = 0 if cut[0] in g.indexer_layers else 2048 * 4
        assert planned.network["pipeline"]["bytes_per_token"] == 2 * 6144 * 2 + more


@pytest.mark.parametrize(
    ("model", "constraints", "sizes"),
    [
        ("glm-5-nvfp4", {"NNODES": 2}, (8, 2)),
        ("glm-5-nvfp4", {"NNODES": 2, "TP": 8}, (8, 2)),
        ("glm-5-nvfp4", {"NNODES": 2, "TP": 16}, (16, 1)),
        ("glm-5-nvfp4", {"NNODES": 2, "PP": 1}, (16, 1)),
        ("glm-5-nvfp4", {"NNODES": 2, "PP": 4}, (4, 4)),
        ("glm-5-nvfp4", {"NNODES": 4}, (8, 4)),
        ("glm-5-nvfp4", {"NNODES": 4, "TP": 16}, (16, 2)),
        ("glm-5-nvfp4", {"NNODES": 4, "PP": 2}, (16, 2)),
        ("glm-5-nvfp4", {"NNODES": 2, "SPECULATIVE": "mtp"}, (16, 1)),
        ("llama-8b", {"NNODES": 3}, (8, 3)),
        ("qwen3-30b-a3b", {"NNODES": 2}, (8, 2)),
    ],
)
def test_auto_lays_a_stage_on_each_box_where_the_engine_can(
    model: str, constraints: dict[str, Any], sizes: tuple[int, int]
) -> None:
    planned = make(model, rtx(), **constraints)
    assert planned.feasible, planned.reasons
    assert (planned.parallel["tp"], planned.parallel["pp"]) == sizes and len(planned.nodes) == constraints["NNODES"]
    assert " ".join(planned.flags).count("--pp-size") == (sizes[1] > 1)


def test_a_model_that_cannot_be_cut_is_split_by_width_over_all_boxes() -> None:
    from entrypoint.checkpoint import model as checkpoint

    config = {**read("qwen3-30b-a3b").config, "architectures": ["OlmoeForCausalLM"]}
    found = checkpoint.assemble(config, {}, None, model="x", revision=None, path=None)
    planned = make(found, rtx(2), NNODES=2)
    assert (planned.parallel["tp"], planned.parallel["pp"]) == (4, 1)
    refused = make(found, rtx(2), NNODES=2, PP=2)
    assert not refused.feasible and "cannot cut OlmoeForCausalLM" in refused.reasons[0]
    assert "PP=1" in refused.reasons[0]


@pytest.mark.parametrize(
    ("constraints", "words"),
    [
        ({"NNODES": 3, "TP": 8, "PP": 2}, ["does not come out even over 3 boxes", "PP=3 would fit"]),
        ({"NNODES": 2, "TP": 4, "PP": 3}, ["does not come out even over 2 boxes", "would fit"]),
        ({"NNODES": 2, "TP": 16, "PP": 2}, ["needs 32 GPUs, 2 boxes of 8 are there", "TP=8 would fit"]),
        ({"NNODES": 2, "PP": 80}, ["more than the model's 78 layers"]),
        ({"NNODES": 2, "PP": 2, "SPECULATIVE": "mtp"}, ["SGLANG_ENABLE_PP_SPEC=1", "SPECULATIVE=off would fit"]),
        ({"NNODES": 2, "PP": 2, "ENGINE_ARGS": "--min-free-slots-delay 2"}, ["--min-free-slots-delay", "PP=2"]),
        ({"NNODES": 2, "ENGINE_ARGS": "--dp-size 2"}, ["removing --dp-size from ENGINE_ARGS would fit"]),
        ({"NNODES": 2, "DEVICE": "cpu"}, ["NNODES=2: two ranks do not run on the CPU"]),
    ],
)
def test_what_cannot_be_started_is_refused_with_a_way_out(constraints: dict[str, Any], words: list[str]) -> None:
    planned = make("glm-5-nvfp4", rtx(), **constraints)
    assert not planned.feasible
    text = "; ".join(planned.reasons)
    assert all(word in text for word in words), text


def test_the_engines_switch_for_drafts_on_the_last_stage_is_seen() -> None:
    constraints: dict[str, Any] = {"NNODES": 2, "PP": 2, "SPECULATIVE": "mtp"}
    assert make("glm-5-nvfp4", rtx(), passed={"SGLANG_ENABLE_PP_SPEC": "1"}, **constraints).feasible
    both = make("glm-5-nvfp4", rtx(), passed={"SGLANG_ENABLE_PP_SPEC": "1"}, DP_ATTENTION=2, **constraints)
    assert not both.feasible


def test_too_small_boxes_ask_for_more_of_them() -> None:
    planned = make("glm-5-nvfp4", rtx(4, total=48 << 30), NNODES=2)
    assert not planned.feasible
    text = "; ".join(planned.reasons)
    assert "NNODES=4 with TP=4 with PP=4 would fit" in text
    assert make("glm-5-nvfp4", rtx(4, total=48 << 30), NNODES=4, TP=4, PP=4).feasible


@pytest.mark.parametrize("text", ["40,39", "78", "40,x", "0,78", "-2,80", ",".join(["1"] * 78)])
def test_a_partition_that_the_engine_would_refuse_is_refused(text: str) -> None:
    planned = make("glm-5-nvfp4", rtx(), NNODES=2, PP=2, passed={"SGLANG_PP_LAYER_PARTITION": text})
    assert not planned.feasible and "39,39" in planned.reasons[0]


def test_a_partition_moves_layers_and_bounds_the_pool_by_the_fullest_stage() -> None:
    planned = make("glm-5-nvfp4", rtx(), NNODES=2, passed={"SGLANG_PP_LAYER_PARTITION": "50,28"})
    first, last = (node["stages"][0] for node in planned.nodes)
    assert (first["layers"], last["layers"]) == ([0, 49], [50, 77]) and held(planned) == list(range(78))
    assert first["kv_tokens"] < last["kv_tokens"] and planned.max_total_tokens == first["kv_tokens"]
    assert planned.max_total_tokens and TWO.max_total_tokens and planned.max_total_tokens < TWO.max_total_tokens


def test_more_boxes_than_make_sense_and_what_the_network_is_told() -> None:
    with pytest.raises(Stop) as stop:
        make("glm-5-nvfp4", rtx(), NNODES=10**9)
    assert stop.value.exit_code == 78
    names = {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
    warnings = " ".join(make("glm-5-nvfp4", rtx(), NNODES=2, passed=names).warnings)
    assert "TCP alone" in warnings and "NCCL_SOCKET_IFNAME=lo" in warnings
    assert "TCP alone" not in " ".join(make("glm-5-nvfp4", rtx(), passed=names).warnings)
    assert "4 of the 8 GPUs of each box stay idle" in make("glm-5-nvfp4", rtx(), NNODES=2, TP=4).warnings


def test_a_pipeline_captures_no_prefill_graphs_unless_told_to() -> None:
    one, two = (make("llama-8b", h200(8), NNODES=nodes) for nodes in (1, 2))
    told = make("llama-8b", h200(8), NNODES=2, ENGINE_ARGS="--cuda-graph-backend-prefill breakable")
    assert two.per_gpu[0].graph_bytes < told.per_gpu[0].graph_bytes == one.per_gpu[0].graph_bytes


def test_a_reading_of_one_stages_weights_is_not_taken_for_anothers() -> None:
    read = float(TWO.nodes[0]["stages"][0]["weights_bytes"])
    sizes = {"tp": 8.0, "pp": 2.0, "ep": 1.0, "dp": 1.0}
    again = make("glm-5-nvfp4", rtx(), NNODES=2, learned=plan.Learned(readings={**sizes, "weights": read}))
    assert again.nodes == TWO.nodes


def test_one_box_with_stages_has_one_node() -> None:
    planned = make("glm-5-nvfp4", rtx(), TP=4, PP=2)
    assert planned.feasible and len(planned.nodes) == 1 and planned.network is None and planned.one_box is None
    assert [stage["gpus"] for stage in planned.nodes[0]["stages"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert held(planned) == list(range(78))


FEW = settings(max_examples=40, deadline=None, derandomize=True)


@FEW
@given(
    st.sampled_from(MODELS),
    st.integers(1, 6),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([None, 1, 2, 4, 8, 16]),
    st.sampled_from([None, 1, 2, 3, 4, 6, 12]),
)
def test_sums_of_the_nodes_are_the_totals_and_every_layer_is_held_once(
    model: str, nodes: int, count: int, tp: int | None, pp: int | None
) -> None:
    sizes: dict[str, Any] = {name: value for name, value in (("TP", tp), ("PP", pp)) if value}
    planned = make(model, rtx(count, total=300 << 30), NNODES=nodes, **sizes)
    json.dumps(planned.document([], {}))
    if not planned.feasible:
        assert planned.reasons
        return
    size = planned.parallel["tp"] * planned.parallel["pp"]
    assert len(planned.nodes) == nodes and len(planned.per_gpu) == size and adds_up(planned)
    g = geometry.of(read(model).config, read(model).architecture)
    assert held(planned) == list(range(g.layers))
    stages = [stage for node in planned.nodes for stage in node["stages"]]
    assert planned.max_total_tokens == min(s["kv_tokens"] for s in stages if s["kv_tokens"] is not None)
    assert planned.kv_bytes_per_token == max(stage["kv_bytes_per_token"] for stage in stages)
    for node in planned.nodes:
        own = [account for account in planned.per_gpu if account.node == node["rank"]]
        assert node["gpus"] == [account.index for account in own] and len(own) == size // nodes
        for name in ("weights_bytes", "kv_bytes", "free_bytes"):
            assert node[name] == sum(getattr(account, name) for account in own), name
        assert sum(len(stage["gpus"]) for stage in node["stages"]) == len(own)
    for stage in {stage["stage"] for stage in stages}:
        parts = [s["tensor_ranks"] for s in stages if s["stage"] == stage]
        ranks = [rank for first, last in parts for rank in range(first, last + 1)]
        assert ranks == list(range(planned.parallel["tp"]))
    assert [s["stage"] for s in stages if s["lm_head"]] == [planned.parallel["pp"] - 1] * planned_span(planned)


def planned_span(planned: plan.Plan) -> int:
    return max(1, len(planned.nodes) // planned.parallel["pp"])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pp", [2, 3, 5])
def test_the_stages_tensors_are_those_of_one_stage(model: str, pp: int) -> None:
    found = read(model)
    g = geometry.of(found.config, found.architecture)
    whole = sharding.share(found.groups, g, Parallel(2), 0, sm=120).tensors
    parts = [sharding.share(found.groups, g, Parallel(2, pp), stage, sm=120).tensors for stage in range(pp)]
    # Some classes keep the output head on every stage (models/llama.py, models/qwen3_moe.py).
    head = 2 * g.vocab * g.hidden // 2 if heads_everywhere(g.architecture) and not g.tied else 0
    assert sum(parts) == whole + (pp - 1) * head and min(parts) > 0


def test_a_tied_embedding_is_held_by_the_last_stage_too() -> None:
    found = read("qwen3-30b-a3b")
    g = geometry.of({**found.config, "tie_word_embeddings": True}, found.architecture)
    whole = sharding.share(found.groups, g, Parallel(2), 0, sm=120).tensors
    parts = [sharding.share(found.groups, g, Parallel(2, 2), stage, sm=120).tensors for stage in range(2)]
    assert sum(parts) - whole == g.vocab * g.hidden * 2 // 2


@pytest.fixture
def box(tmp_path: Path) -> dict[str, str]:
    """Settings for `relaunch plan` of a directory with a config.json alone."""
    (tmp_path / "config.json").write_text((CONFIGS / "glm-5-nvfp4.json").read_text())
    document = {"gpus": [{k: v for k, v in asdict(gpu).items() if v is not None} for gpu in rtx().gpus]}
    (tmp_path / "box.json").write_text(json.dumps(document))
    return {
        "RELAUNCH_MODEL": str(tmp_path),
        "RELAUNCH_GPU_INVENTORY": str(tmp_path / "box.json"),
        "RELAUNCH_STATE_DIR": str(tmp_path / "state"),
        "RELAUNCH_NNODES": "2",
        "RELAUNCH_DIST_INIT_ADDR": "10.0.0.1:5000",
    }


def test_both_nodes_plan_the_same_but_for_their_rank(box: dict[str, str]) -> None:
    (one, code), (other, _) = (planning.plan_document({**box, "RELAUNCH_NODE_RANK": rank}) for rank in "01")
    assert code == 0
    at = one["engine"]["argv"].index("--node-rank") + 1
    assert (one["engine"]["argv"].pop(at), other["engine"]["argv"].pop(at)) == ("0", "1")
    assert one == other
    assert "--pp-size" in one["engine"]["argv"] and "10.0.0.1:5000" in one["engine"]["argv"]


def test_what_the_operator_sets_for_the_engine_reaches_the_plan(box: dict[str, str]) -> None:
    document, _ = planning.plan_document({**box, "SGLANG_PP_LAYER_PARTITION": "40,38"})
    assert [node["stages"][0]["layers"] for node in document["nodes"]] == [[0, 39], [40, 77]]
    assert document["engine"]["env"]["SGLANG_PP_LAYER_PARTITION"] == "40,38"
    assert "SGLANG_PP_LAYER_PARTITION" not in loading.load(box).environment


def shown(planned: plan.Plan, width: int = 80) -> str:
    out = io.StringIO()
    document = planned.document(["python", *planned.flags], {})
    Console(file=out, width=width, no_color=True).print(plan_text.render(document))
    return out.getvalue()


@pytest.mark.parametrize(
    "planned",
    [
        TWO,
        make("glm-5-nvfp4", rtx(), NNODES=2, TP=16),
        make("qwen3-30b-a3b", rtx(), NNODES=2, PP=4),
        make("glm-5-nvfp4", rtx(), NNODES=6, PP=6),
        make("glm-5-nvfp4", rtx(4), NNODES=2),
        make("glm-5-nvfp4", rtx(4), NNODES=2, TP=16),
    ],
    ids=["two", "wide", "stages", "six", "small", "refused"],
)
def test_the_terminal_view_of_several_boxes_fits_80_columns(planned: plan.Plan) -> None:
    lines = shown(planned).splitlines()
    assert all(line == line.rstrip() and len(line) <= 80 for line in lines)
    assert ("between the boxes" in lines) == planned.feasible


def test_the_terminal_view_says_who_holds_what_and_what_it_gives() -> None:
    text = shown(TWO)
    assert "box 0  stage 0: layers 0-38, embedding" in text and "box 1  stage 1: layers 39-77, lm_head" in text
    assert "2 boxes of 8x" in text.replace("\n", " ") and "3." in text and "prompts of full length at once" in text
    wide = shown(make("glm-5-nvfp4", rtx(), NNODES=2, TP=16))
    assert "box 1  stage 0, tensor ranks 8-15: layers 0-77" in wide and "156 all-reduces" in wide
    assert "box 0 GPU 4-7" in shown(make("qwen3-30b-a3b", rtx(), NNODES=2, PP=4))
    assert "does not fit, weights need" in " ".join(shown(make("glm-5-nvfp4", rtx(4), NNODES=2)).split())
    single = shown(make("glm-5-nvfp4", rtx(), TP=4, PP=2))
    assert "stage 0: layers 0-38, embedding; stage 1: layers 39-77, lm_head" in single
