"""What stands on a GPU besides weights and KV, term by term, and what sglang itself would set aside.

Formulas of sglang/srt 0.5.23 are cited; a term that no formula gives is an allowance with its evidence. Readings
are of sglang 0.5.23 on H200 (dummy weights) unless they say otherwise. Sizes in bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..checkpoint.geometry import Geometry
from ..host.inventory import Gpu
from ..units import GIB, MIB
from .sharding import Parallel

# nvidia-smi's total holds 616 MiB that no process ever sees (NVML memory.reserved on H200; torch says 94.97 of
# 95.59 GiB on RTX PRO 6000).
RESERVED = 616 * MIB
# CUDA context and modules before the baseline: 139.80 visible, 139.11 to 139.13 free at the baseline.
CONTEXT = int(0.68 * GIB)
# On PCIe cards before Hopper context and communicators together: 23.08 GiB free of 23.39 on 4x RTX 4090, 21.63 of 21.93
# on 4x L4 (public logs).
CONTEXT_PCIE = int(0.32 * GIB)
# NCCL's communicator and the custom all-reduce before the baseline, over NVLink: 138.21 at TP2, 137.99 at TP4;
# TP8 is extrapolated. Over PCIe: 93.86 to 94.05 free of 94.97 on 8x RTX PRO 6000 (two public logs).
NCCL_NVLINK = {2: int(0.91 * GIB), 4: int(1.13 * GIB), 8: int(1.35 * GIB)}
NCCL_PCIE = int(0.40 * GIB)
# Over sockets and shared memory between nodes: 138.37 free on two nodes of one H200 each.
NCCL_NODES = int(0.80 * GIB)
# Attention metadata, cuBLAS workspaces, kernels loaded late: 0.13 to 0.62 GiB between pool and graphs, and
# memory_hook.py:handle_gpu_memory_settings' own constant.
RUNTIME = 512 * MIB
# memory_hook.py: tp*pp/8 GiB "for large parallel size"; torch's own communicators come up after the baseline.
PARALLEL = GIB
# FlashInfer's fused all-reduce over NVLink (SM90 and SM100): 1.0 GiB outside torch for GLM-5 at TP2.
FUSED = GIB
# SGLANG_FLASHINFER_WORKSPACE_SIZE; sparse MLA allocates a second one of its own.
WORKSPACE = 384 * MIB
# Per captured decode size and 32 layers: 0.09 GiB for 6 sizes, 0.20 for 12 (TP2), 0.16 for 6 of a hybrid model,
# 0.33 for 36; vLLM reads 0.75 for GLM-5.1.
DECODE_GRAPH = 24 * MIB
# Non-torch memory per captured prefill size (memory_hook.py:reserve_for_graph_mb); MLA 1.5 GiB there.
PREFILL_GRAPH, PREFILL_GRAPH_MLA = 8 * MIB, 1536 * MIB
# memory_hook.py: MiB of activations per prefill token, least number of tokens, and the floor on big cards.
FORMULA_TOKEN, FORMULA_TOKENS, FORMULA_FLOOR = 1.5, 2048, 10 * GIB
# What goes between baseline and pool without being weights: 34 boots on H200 found up to 41 MiB less than the account.
# Taken off the pool, so that the plan does not promise what is not there.
DRIFT = 48 * MIB
# SGLANG_DSA_MQA_LOGITS_FREE_MEM_FRACTION
LOGITS_SHARE = 0.2
# Multimodal models: SGLANG_VLM_CACHE_SIZE_MB is taken out of the KV budget (mm_runtime_reservation_gb).
MULTIMODAL = 100 * MIB


def visible(gpu: Gpu) -> int:
    """What a process can ever get: free memory, and never what the driver keeps for itself."""
    return max(0, min(gpu.free_bytes, gpu.total_bytes - min(RESERVED, gpu.total_bytes // 40)))


def before_weights(parallel: Parallel, nvlink: bool, sm: int) -> int:
    """What context and communicators take before sglang reads its memory baseline."""
    world = parallel.tp * parallel.pp
    if sm < 90 and not nvlink and parallel.nodes == 1:
        return CONTEXT_PCIE
    if world == 1:
        return CONTEXT
    between = NCCL_NODES if parallel.nodes > 1 else 0
    if not nvlink:
        return CONTEXT + max(NCCL_PCIE, between)
    return CONTEXT + max(between, next((size for n, size in NCCL_NVLINK.items() if world <= n), NCCL_NVLINK[8]))


def allocator_share(gpu: Gpu, parallel: Parallel, nvlink: bool, margin: int) -> float:
    """The share of the card that torch's allocator may hold, its cache included (``per_process_memory_fraction``).

    Blocks that grow from step to step (the sparse indexer's logits: 64 MiB more with every 4,096 tokens of a prompt)
    are each taken anew while the old ones stay cached: eight prompts of 60,000 tokens left 0.81 GiB of 8.37 on H200.
    torch gives its cache back before it fails, but kernels that load late and communicators do not ask it to. Rounded
    down; of the whole card, so that memory that others give back before the start never makes it too small."""
    total = gpu.total_bytes - min(RESERVED, gpu.total_bytes // 40)
    world = parallel.tp * parallel.pp
    # Read on H200 while it served: 0.08 to 0.26 GiB at TP1, 0.62 at TP2 without the fused all-reduce.
    late = RUNTIME // 2 + (PARALLEL * world // 8 + FUSED * nvlink if world > 1 else 0)
    kept = before_weights(parallel, nvlink, gpu.sm) + late + margin
    return math.floor(max(0.0, 1 - kept / max(1, total)) * 10_000) / 10_000


_ENDLESS = 1 << 62
_DECODE_SIZES = (
    range(1, 2),
    range(2, 3),
    range(4, 13, 4),
    range(16, 257, 8),
    range(272, 512, 16),
    range(512, _ENDLESS, 32),
)
_DRAFT_SIZES = (range(1, 9), range(10, 33, 2), range(40, 65, 4), range(72, 257, 8), range(272, _ENDLESS, 16))
_PREFILL_SIZES = (
    range(4, 33, 4),
    range(48, 257, 16),
    range(288, 513, 32),
    range(576, 1025, 64),
    range(1280, 4097, 256),
    range(4608, _ENDLESS, 512),
)


def _up_to(spans: tuple[range, ...], most: int) -> int:
    """How many numbers of the spans are at most ``most``; no list is made, whatever a person asks for."""
    return sum(len(range(span.start, min(span.stop, most + 1), span.step)) for span in spans)


def decode_sizes(max_bs: int, *, speculative: bool = False) -> int:
    """How many decode graphs are captured (cuda_graph_hook.py:generate_decode_cuda_graph_batch_sizes)."""
    if max_bs <= 0:
        return 0
    spans = _DRAFT_SIZES if speculative else _DECODE_SIZES
    return _up_to(spans, max_bs) + all(max_bs not in span for span in spans)


def prefill_sizes(tokens: int) -> int:
    """cuda_graph_hook.py:generate_prefill_cuda_graph_batch_sizes"""
    return _up_to(_PREFILL_SIZES, tokens)


@dataclass(frozen=True)
class Load:
    """What the non-static part must carry. ``chunk``: tokens of one prefill step on one rank; ``graph_bs`` 0:
    no decode graphs; ``prefill_graph``: captured; ``draft_tokens`` 0: no speculation."""

    chunk: int
    graph_bs: int
    requests: int
    context: int
    prefill_graph: bool
    draft_tokens: int = 0


def graphs(g: Geometry, load: Load) -> int:
    """Decode and prefill graphs."""
    per_size = DECODE_GRAPH * max(1.0, g.layers / 32)
    size = int(per_size * decode_sizes(load.graph_bs, speculative=load.draft_tokens > 0))
    if load.draft_tokens:
        size *= 2  # the draft's graphs: 2.39 GiB with MTP against 0.75 without (vLLM, GLM-5.1)
    if load.prefill_graph:
        size += PREFILL_GRAPH_MLA if g.mla else PREFILL_GRAPH * prefill_sizes(load.chunk)
    return size


def activations(g: Geometry, parallel: Parallel, load: Load) -> int:
    """Peak of one prefill step. Widths of the tensors alive at once in the widest block, plus a quarter: for
    8,192 tokens it gives 1.8, 1.4, 1.1 and 3.0 GiB where 1.6 (MiniMax-M2), 0.7 (gpt-oss-20b), 0.9 (Qwen3-30B) and
    2.1 (Qwen3.5 geometry) were read."""
    inner = g.intermediate // parallel.tp
    mlp = 3 * inner
    if g.moe:
        mlp = max(mlp, g.topk * (3 * g.moe_intermediate // parallel.moe_tp + g.hidden)) + g.experts
    heads = max(1, g.heads // parallel.attn_tp)
    if g.mla:
        attention = 2 * heads * (g.kv_lora + g.rope) + g.q_lora + g.index_heads * g.index_head_dim
    else:
        attention = heads * (g.head_dim + g.v_head_dim) + 2 * max(1, g.kv_heads // parallel.attn_tp) * g.head_dim
    if g.kinds.linear:
        state = g.kinds.state
        both = state.groups * state.size + state.heads * state.head_dim
        attention = max(attention, 3 * 2 * both // parallel.attn_tp)
    per_token = g.itemsize * (3 * g.hidden + mlp + attention) * 5 // 4
    return 192 * MIB + per_token * max(load.chunk, 256)


def scratch(g: Geometry, load: Load, slack: float, tokens: int) -> int:
    """The sparse indexer beside the activations (layers/attention/dsa/dsa_indexer.py:_get_topk_ragged).

    It gathers the index keys of every sequence of the step (one column each, rows of ``index_head_dim`` bytes and
    their scales) and scores all rows of the step against all columns in fp32. A matrix above a fifth of what is free
    at the first long prefill (layers/attention/mqa_logits_utils.py, at most a fifth of the non-static part) is cut by
    rows, and a piece is dropped only when the next one stands: two at a time. ``slack``: bytes of the non-static
    part; ``tokens``: what the KV pool holds at most."""
    if not g.dsa:
        return 0
    columns = -(-min(load.requests * load.context, max(tokens, load.context)) // g.index_kpool)
    keys = columns * (g.index_head_dim + g.index_head_dim // 128 * 4)
    return keys + int(min(load.chunk * columns * 4, 2 * LOGITS_SHARE * max(0.0, slack - graphs(g, load))))


def request_table(load: Load) -> int:
    """req_to_token: one int32 per position and slot (kv_cache_configurator.py:_build_req_to_token_pool)."""
    return (load.requests + 1) * (load.context + 4 + load.draft_tokens) * 4


def runtime(g: Geometry, parallel: Parallel, load: Load) -> int:
    """Workspaces, tables, logits, communicators: everything that is neither graph nor activation."""
    size = RUNTIME + request_table(load) + WORKSPACE * (2 if g.mla else 1)
    size += int(PARALLEL * parallel.tp * parallel.pp / 8) if parallel.tp * parallel.pp > 1 else 0
    size += max(1, load.graph_bs) * max(1, load.draft_tokens) * g.vocab * 4  # graph_shared_output.py
    if g.dsa and load.draft_tokens:
        size += max(1, load.graph_bs) * load.draft_tokens * load.context * 4  # wide page tables
    if parallel.dp > 1:
        size += int(load.graph_bs * parallel.dp * 3 * MIB)  # memory_hook.py: padding of attention DP
    return size


def pcie_workspace(g: Geometry, parallel: Parallel, load: Load) -> int:
    """Slab of FlashInfer's PCIe all-reduce on each rank: twice two epochs of every rank's largest decode step and the
    copy engine's ring (pcie_ipc_all_reduce.cuh:compute_workspace_layout)."""
    payload = max(1, load.graph_bs) * max(1, load.draft_tokens) * g.hidden * 2
    return (4 * parallel.tp + 2) * payload + MIB


def engine_reserve(g: Geometry, parallel: Parallel, load: Load, total: int) -> int:
    """What sglang would set aside for these settings were it asked to choose the fraction
    (memory_hook.py:handle_gpu_memory_settings). Its jump to 10 GiB on cards above 60 GiB is drawn out below
    them, so that a bigger card never gets fewer tokens."""
    size = _set_aside(g, parallel, load)
    size = max(size, min(FORMULA_FLOOR, total // 6))
    return int(total - (total - size) * g.pictures)


def _set_aside(g: Geometry, parallel: Parallel, load: Load) -> float:
    """The engine's reserve without its floor, and without room for pictures."""
    tokens = max(load.chunk, FORMULA_TOKENS)
    size = RUNTIME + tokens * FORMULA_TOKEN * MIB + parallel.tp * parallel.pp / 8 * GIB + 2 * MIB * load.graph_bs
    if load.prefill_graph:
        size += PREFILL_GRAPH_MLA if g.mla else PREFILL_GRAPH * prefill_sizes(load.chunk)
    if parallel.dp > 1:
        size += load.graph_bs * parallel.dp * (4.5 if load.graph_bs > 300 else 3) * MIB
    return size


def engine_steps(parallel: Parallel, total: int) -> tuple[int, int]:
    """(tokens of a prefill step, largest decode batch captured) that sglang picks on this card without any flag
    (memory_hook.py:handle_gpu_memory_settings)."""
    mib = total / MIB
    tiers = ((20, 2048, 8, 8), (35, 4096, 48, 160), (60, 4096, 32, 160), (160, 8192, 256, 512))
    _, chunk, small, large = next((tier for tier in tiers if mib < tier[0] * 1024), (0, 16384, 512, 512))
    return chunk, large if parallel.tp >= 4 else small


def engine_default(g: Geometry, parallel: Parallel, total: int) -> float:
    """The fraction that sglang 0.5.23 itself picks on this card without any flag."""
    chunk, graph_bs = engine_steps(parallel, total)
    # A pipeline captures no prefill graphs unless it is told to (cuda_graph_hook.py:apply_cuda_graph_compatibility).
    load = Load(chunk // parallel.dp, graph_bs, 1, 1, parallel.pp == 1)
    size = _set_aside(g, parallel, load)
    if total > 60 * GIB:
        size = max(size, FORMULA_FLOOR)
    return round(round((total - size) / total, 3) * g.pictures, 4) if total > 0 else 0.0
