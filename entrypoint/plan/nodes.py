"""What each node holds, what crosses the network between nodes, and what one node alone would hold."""

from __future__ import annotations

from typing import Any

from ..checkpoint.geometry import Geometry
from ..units import MIB, format_bytes
from . import solve
from .memory import Load
from .plan import Account, Plan
from .sharding import Parallel

Document = dict[str, Any]

# Rows of indices that a stage hands on to layers which share the last indexer's choice (models/deepseek_v2.py).
_INDEX = 4


def document(case: solve.MemoryCase, result: solve.MemoryResult) -> tuple[Document, ...]:
    """One entry a node: its GPUs by index, sums over them in bytes, and the pipeline stages that it runs. A stage's
    ``layers`` and ``tensor_ranks`` are first and last; its sizes are per GPU, ``kv_tokens`` what its pool alone would
    hold. Empty where the layout does not fit the boxes."""
    parallel = case.parallel
    if len(case.gpus) != parallel.tp * parallel.pp:
        return ()
    found = []
    for node in range(parallel.nodes):
        first = node * parallel.per_node
        accounts = result.accounts[first : first + parallel.per_node]
        stages = sorted({rank // parallel.tp for rank in range(first, first + parallel.per_node)})
        found.append(
            {
                "rank": node,
                "gpus": [account.index for account in accounts],
                "weights_bytes": sum(account.weights_bytes for account in accounts),
                "kv_bytes": _sum([account.kv_bytes for account in accounts]),
                "free_bytes": _sum([account.free_bytes for account in accounts]),
                "stages": [_stage(case, result, stage, first, accounts) for stage in stages],
            }
        )
    return tuple(found)


def _stage(
    case: solve.MemoryCase, result: solve.MemoryResult, stage: int, first: int, accounts: tuple[Account, ...]
) -> Document:
    parallel, g = case.parallel, case.g
    layers = parallel.layers(g.layers, stage)
    here = [(first + i, account) for i, account in enumerate(accounts) if (first + i) // parallel.tp == stage]
    last = stage == parallel.pp - 1
    return {
        "stage": stage,
        "gpus": [account.index for _, account in here],
        "tensor_ranks": [here[0][0] % parallel.tp, here[-1][0] % parallel.tp],
        "layers": [layers.start, layers.stop - 1],
        "embedding": stage == 0 or (last and g.tied),
        "lm_head": last,
        "weights_bytes": here[0][1].weights_bytes,
        "kv_bytes_per_token": int(result.cells[stage]),
        "kv_tokens": result.stage_tokens[stage],
    }


def _sum(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def network(g: Geometry, parallel: Parallel, load: Load) -> Document | None:
    """Bytes between nodes, None on one node.

    ``pipeline``: what one node sends the next where a stage ends: hidden states and residual of every token, each
    once, in slices that the tensor ranks gather again (scheduler_pp_mixin.py:_pp_send_dict_to_next_stage), and the
    sparse indexer's choice where the next layer shares it. ``tensor``: where a stage lies over several nodes, two
    all-reduces a layer; an all-reduce of S bytes over n nodes makes each send at least 2(n-1)/n S. Per prefill step
    of a whole chunk, and per decode step of the largest batch of one rank."""
    if parallel.nodes == 1:
        return None
    prefill, decode = max(1, load.chunk), max(1, min(load.graph_bs or load.requests, load.requests))
    pipe = tensor = None
    if parallel.pp > 1:
        per_token = 2 * g.hidden * g.itemsize + _shared(g, parallel)
        pipe = {
            "boundaries": min(parallel.pp, parallel.nodes) - 1,
            "bytes_per_token": per_token,
            "bytes_per_prefill_step": per_token * prefill,
            "bytes_per_decode_step": per_token * decode,
        }
    if parallel.span > 1:
        count = 2 * max(len(parallel.layers(g.layers, stage)) for stage in range(parallel.pp))
        per_token = count * g.hidden * g.itemsize * 2 * (parallel.span - 1) // parallel.span
        tensor = {
            "nodes": parallel.span,
            "all_reduces": count,
            "bytes_per_token": per_token,
            "bytes_per_prefill_step": per_token * prefill,
            "bytes_per_decode_step": per_token * decode,
        }
    return {"pipeline": pipe, "tensor": tensor, "prefill_tokens": prefill, "decode_tokens": decode}


def _shared(g: Geometry, parallel: Parallel) -> int:
    """Indices per token where a stage begins with a layer that has no indexer of its own."""
    starts = [parallel.layers(g.layers, stage).start for stage in range(1, parallel.pp)]
    return g.index_topk * _INDEX if g.dsa and any(start not in g.indexer_layers for start in starts) else 0


def size(count: float) -> str:
    """A message's size, with a decimal where it is small."""
    return f"{count / MIB:.1f} MiB" if MIB <= count < 10 * MIB else format_bytes(count)


def one_box(plan: Plan, alone: Plan) -> Document:
    """What one of the nodes would hold by itself. ``times``: the group's KV tokens over its."""
    tokens, more = alone.max_total_tokens, plan.max_total_tokens
    times = more / tokens if alone.feasible and tokens and more else None
    return {
        "feasible": alone.feasible,
        "reason": None if alone.feasible else (alone.reasons or ("it does not fit",))[0],
        "tp": alone.parallel["tp"],
        "kv_bytes_per_token": alone.kv_bytes_per_token,
        "max_total_tokens": tokens if alone.feasible else None,
        "context_length": alone.context_length if alone.feasible else None,
        "max_running_requests": alone.max_running_requests if alone.feasible else None,
        "chunked_prefill_size": alone.chunked_prefill_size if alone.feasible else None,
        "times": round(times, 2) if times else None,
    }
