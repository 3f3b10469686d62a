"""What the sparse indexer allocates beside the activations, and that torch's cache stays out of the margin."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planned import GIB, h200, make, read, rtx

from entrypoint.checkpoint import geometry
from entrypoint.plan import memory, plan
from entrypoint.plan.memory import Load
from entrypoint.plan.sharding import Parallel

GLM = geometry.of(read("glm-5-nvfp4").config, read("glm-5-nvfp4").architecture)
LOAD = Load(chunk=4096, graph_bs=0, requests=64, context=202_752, prefill_graph=False)


def share(planned: plan.Plan) -> float:
    name, _, value = planned.env["PYTORCH_ALLOC_CONF"].partition(":")
    assert name == "per_process_memory_fraction"
    return float(value)


def test_two_pieces_of_logits_stand_at_once_each_at_most_a_fifth_of_what_is_free() -> None:
    keys = 492_672 * 132
    assert memory.scratch(GLM, LOAD, 10 * GIB, 492_672) == keys + 4 * GIB
    assert memory.scratch(GLM, replace(LOAD, chunk=64), 10 * GIB, 492_672) == keys + 64 * 492_672 * 4


@pytest.mark.parametrize(("requests", "tokens", "columns"), [(1, 10**6, 202_752), (64, 400_000, 400_000)])
def test_a_step_scores_every_sequence_in_it_but_no_more_than_the_pool_holds(
    requests: int, tokens: int, columns: int
) -> None:
    load = replace(LOAD, chunk=16, requests=requests)
    assert memory.scratch(GLM, load, 100 * GIB, tokens) == columns * (132 + 16 * 4)


def test_a_model_without_an_indexer_needs_none() -> None:
    dense = geometry.of(read("llama-8b").config, read("llama-8b").architecture)
    assert memory.scratch(dense, LOAD, 10 * GIB, 10**6) == 0


@pytest.mark.parametrize("constraints", [{}, {"KV_CACHE_DTYPE": "fp8_e4m3"}, {"CHUNKED_PREFILL_SIZE": 8192}, {"TP": 2}])
def test_the_chosen_fraction_leaves_room_for_it_and_the_margin(constraints: dict[str, object]) -> None:
    planned = make("glm-5-8-layers", h200(int(str(constraints.get("TP", 1)))), **constraints)
    line = planned.per_gpu[0]
    assert planned.feasible and planned.mem_fraction_static
    slack = (planned.gpus[0]["total_bytes"] - line.baseline_bytes) * (1 - planned.mem_fraction_static)
    assert line.margin_bytes == GIB and line.free_bytes is not None and line.free_bytes >= 0
    assert line.activation_bytes > 2 * 0.2 * (slack - line.graph_bytes)


@pytest.mark.parametrize(("model", "box"), [("glm-5-nvfp4", rtx()), ("glm-5-8-layers", h200()), ("llama-8b", h200(2))])
def test_torch_may_hold_all_of_the_account_but_nothing_of_the_margin(model: str, box: object) -> None:
    planned = make(model, box)  # type: ignore[arg-type]
    line, card = planned.per_gpu[0], planned.gpus[0]["total_bytes"]
    limit = share(planned) * (card - memory.RESERVED)
    pre = card - line.baseline_bytes
    assert pre - 2.6 * GIB < limit < pre - line.margin_bytes
    assert limit > line.weights_bytes + (line.kv_bytes or 0) + line.graph_bytes + line.activation_bytes + GIB


def test_the_limit_follows_the_margin_and_not_what_others_hold_for_now() -> None:
    box = rtx()
    fuller = replace(box, gpus=tuple(replace(gpu, free_bytes=gpu.free_bytes - 4 * GIB) for gpu in box.gpus))
    usual = share(make("glm-5-nvfp4", box))
    assert share(make("glm-5-nvfp4", fuller)) == usual
    assert share(make("glm-5-nvfp4", box, MEMORY_MARGIN="2GiB")) == pytest.approx(usual - 1 / 94.99, abs=2e-4)
    assert memory.allocator_share(box.gpus[0], Parallel(tp=8), False, 1 << 50) == 0.0
