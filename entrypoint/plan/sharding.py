"""Which rank holds how much of each tensor, and what the engine keeps beside the checkpoint's tensors.

Rules are a table by name; the first that matches decides. Sources are files of sglang/srt 0.5.23.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from ..checkpoint.engine_models import heads_everywhere
from ..checkpoint.geometry import Geometry
from ..checkpoint.model import Group


@dataclass(frozen=True)
class Parallel:
    """World layout of one replica. Rank r is pipeline stage r // tp, tensor rank r % tp; node n of ``nodes`` runs the
    n-th of equal shares of the ranks (entrypoints/engine.py:_calculate_rank_ranges). ``partition``: layers of each
    stage where SGLANG_PP_LAYER_PARTITION says them; ``dp_lm_head``: the output head is whole per attention group."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    nodes: int = 1
    partition: tuple[int, ...] = ()
    dp_lm_head: bool = False

    @property
    def attn_tp(self) -> int:
        """Ranks that share the attention of one request."""
        return max(1, self.tp // self.dp)

    @property
    def moe_tp(self) -> int:
        """Ranks over which the width of one expert is split."""
        return max(1, self.tp // self.ep)

    @property
    def per_node(self) -> int:
        """Ranks, and so GPUs, of one node."""
        return max(1, self.tp * self.pp // self.nodes)

    @property
    def span(self) -> int:
        """Nodes over which one tensor-parallel group lies."""
        return max(1, self.nodes // self.pp)

    def layers(self, total: int, stage: int) -> range:
        """distributed/utils.py:get_pp_indices: even split, the last ``total % pp`` stages get one more."""
        if self.partition:
            start = sum(self.partition[:stage])
            return range(start, start + self.partition[stage])
        base, extra = divmod(total, self.pp)
        first = self.pp - extra
        if stage >= first:
            start = stage * (base + 1) - first
            return range(start, start + base + 1)
        return range(stage * base, (stage + 1) * base)


@dataclass(frozen=True)
class SplitRule:
    """``split``: how a matching tensor is divided. ``keep32``: stays fp32 in a half-precision model."""

    pattern: str
    split: str
    source: str
    keep32: bool = False


# Splits: full (every rank), tp, attn (attention TP), kv (k/v heads, replicated below one per rank), qkv (fused),
# expert, vocab (rows padded), skip (not loaded).
RULES = (
    SplitRule(r"rotary_emb|\.bias_mask$|position_ids$|\.attn\.bias$|\.masked_bias$", "skip", "models/*:load_weights"),
    SplitRule(
        r"(^|\.)visual\.(blocks|merger|deepstack).*\.(qkv|proj|linear_fc[12]|(gate|up|down)_proj|mlp\.\d+)\.weight$",
        "tp",
        "models/qwen3_vl.py, models/qwen2_5_vl.py",
    ),
    SplitRule(
        r"vision_tower\.vision_model\.encoder\..*(fc[12]|[qkv]_proj|out_proj)\.weight$|vision_model\..*position_embedding\.",
        "tp",
        "models/siglip.py",
    ),
    SplitRule(
        r"(^|\.)(visual|vision_tower|vision_model|mm_projector|multi_modal_projector|audio_tower)\.",
        "full",
        "multimodal towers: whole",
    ),
    SplitRule(r"\.shared_head\.|\.eh_proj|\.enorm|\.hnorm", "full", "models/deepseek_nextn.py"),
    SplitRule(r"\.g_idx$", "skip", "gptq_marlin.py: emptied after the load"),
    SplitRule(r"\.experts\.", "expert", "layers/moe/fused_moe_triton/layer.py"),
    SplitRule(r"\.shared_expert_gate\.", "full", "models/qwen2_moe.py"),
    SplitRule(
        r"\.mixer\.gate\.weight$|\.block_sparse_moe\.gate\.weight$", "full", "nemotron_h.py, minimax_m2.py", keep32=True
    ),
    SplitRule(r"\.(gate|router)\.(weight|bias)$", "full", "models/deepseek_v2.py:MoEGate"),
    SplitRule(
        r"\.(mixer|mamba)\.(A_log|D|dt_bias)$", "attn", "layers/attention/mamba/mamba.py:MambaMixer2", keep32=True
    ),
    SplitRule(
        r"\.(mixer|mamba)\.(in_proj|out_proj|conv1d|norm)\.", "attn", "layers/attention/mamba/mamba.py:MambaMixer2"
    ),
    SplitRule(r"\.mixer\.(k_proj|v_proj)\.", "kv", "models/nemotron_h.py"),
    SplitRule(r"\.mixer\.(q_proj|o_proj)\.", "attn", "models/nemotron_h.py"),
    SplitRule(r"e_score_correction_bias$", "full", "models/deepseek_v2.py:MoEGate", keep32=True),
    SplitRule(r"\.indexer\.k_norm\.", "full", "layers/attention/dsa/dsa_indexer.py", keep32=True),
    SplitRule(r"\.indexer\.", "full", "layers/attention/dsa/dsa_indexer.py: replicated"),
    SplitRule(r"\.(q_a_proj|kv_a_proj_with_mqa)\.", "full", "models/deepseek_v2.py: fused_qkv_a_proj_with_mqa"),
    SplitRule(r"\.(q_a_layernorm|kv_a_layernorm)\.", "full", "models/deepseek_v2.py"),
    SplitRule(r"\.(q_b_proj|kv_b_proj)\.", "attn", "models/deepseek_v2.py: ColumnParallelLinear"),
    SplitRule(r"\.linear_attn\.A_log$", "attn", "models/qwen3_5.py:Qwen3_5GatedDeltaNet", keep32=True),
    SplitRule(r"\.linear_attn\.norm\.", "full", "models/qwen3_5.py:Qwen3_5GatedDeltaNet"),
    SplitRule(r"\.linear_attn\.", "attn", "models/qwen3_5.py:Qwen3_5GatedDeltaNet"),
    SplitRule(
        r"\.self_attn\.(k_proj|v_proj)\.|attention\.self\.(key|value)\.", "kv", "layers/linear.py:QKVParallelLinear"
    ),
    SplitRule(r"\.(qkv_proj|c_attn|query_key_value|Wqkv)\.", "qkv", "layers/linear.py:QKVParallelLinear"),
    SplitRule(r"\.self_attn\.(q_proj|o_proj)\.(?!bias)", "attn", "layers/linear.py"),
    SplitRule(r"\.self_attn\.q_proj\.bias$|\.sinks$", "attn", "layers/linear.py, models/gpt_oss.py"),
    SplitRule(r"\.self_attn\.o_proj\.bias$", "full", "layers/linear.py:RowParallelLinear"),
    SplitRule(r"(q_norm|k_norm)\.weight$", "norm", "models/minimax_m2.py:MiniMaxM2RMSNormTP; others replicate"),
    SplitRule(r"attention\.(self\.query|output\.dense)\.", "attn", "models/bert.py"),
    SplitRule(
        r"(^|\.)(embed_tokens|embeddings|lm_head|wte|word_embeddings|output)\.weight$",
        "vocab",
        "layers/vocab_parallel_embedding.py",
    ),
    SplitRule(r"(position|token_type)_embeddings\.weight$", "vocab", "models/bert.py"),
    SplitRule(
        r"(^|\.)(wpe|ln_f|ln_1|ln_2|norm|norm_f|LayerNorm)\.|layernorm|_norm\.", "full", "norms and GPT-2's positions"
    ),
    SplitRule(r"\.(c_proj|down_proj|w2|fc2|dense)\.bias$", "full", "layers/linear.py:RowParallelLinear"),
    SplitRule(
        r"\.(gate_proj|up_proj|gate_up_proj|down_proj|w1|w2|w3|c_fc|c_proj|fc1|fc2|dense|shared_expert\w*)\b",
        "tp",
        "layers/linear.py",
    ),
)

# Above this a block is its own allocation, rounded to 2 MiB; below it shares 20 MiB segments, and under 1 MiB
# 2 MiB ones (torch's CUDA caching allocator).
_LARGE, _MEDIUM, _ROUND, _SEGMENT = 10 << 20, 1 << 20, 2 << 20, 20 << 20
_LAYER = re.compile(r"\.(?:layers|layer|h)\.(\d+)\.|^h\.(\d+)\.")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|embeddings|wte|word_embeddings)\.weight$")
_OUTPUT = re.compile(r"(^|\.)(output|embed_out|score)\.weight$")
_FLOATS = {"BF16", "F16", "F32", "F64"}
_ROW_PARALLEL = re.compile(r"\.(o_proj|down_proj|out_proj|w2|fc2|c_proj|dense)\.")
_SECOND = re.compile(r"\.(down_proj|w2)\.")
# Routers that are computed in fp32 whatever the checkpoint holds (models/glm4_moe.py).
_FP32_GATE, _FP32_GATES = re.compile(r"\.mlp\.gate\.weight$"), {"Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"}
# Models whose embedding is a plain nn.Embedding, whole on every rank (models/gemma3_causal.py).
_WHOLE_EMBEDDING = {"Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"}
# Tensors that the engine allocates as one: qkv, gate and up, q_a with kv_a, an expert layer's w13 and w2.
_FUSED = (
    (re.compile(r"\.(q_proj|k_proj|v_proj)\.(weight|bias)$"), ".qkv_proj."),
    (re.compile(r"\.(gate_proj|up_proj|w1|w3)\."), ".gate_up."),
    (re.compile(r"\.(q_a_proj|kv_a_proj_with_mqa)\."), ".fused_qkv_a."),
    (re.compile(r"\.(in_proj_qkv|in_proj_z)\."), ".in_proj_qkvz."),
)


@cache
def rule_for(tail: str) -> SplitRule | None:
    """The first rule whose pattern matches a tensor's name (layer number taken out), None when none does."""
    return next((rule for rule in RULES if re.search(rule.pattern, tail)), None)


@dataclass(frozen=True)
class Share:
    """One stage's tensors in bytes per GPU. ``swizzle``: scale copies that exist only while loading.
    ``unmatched``: names without a rule, counted as replicated."""

    tensors: int
    rounding: int
    swizzle: int
    largest: int
    unmatched: tuple[str, ...]


def share(
    groups: tuple[Group, ...],
    g: Geometry,
    parallel: Parallel,
    stage: int,
    *,
    sm: int,
    draft: bool = False,
    gptq: bool = False,
) -> Share:
    """What one rank of ``stage`` holds. ``draft``: the MTP layers instead of the model's own; ``gptq``: experts keep
    the scales of every rank's inputs (gptq_moe.py: without act-order)."""
    layers = parallel.layers(g.layers, stage)
    blocks: dict[str, int] = {}
    swizzle = 0
    unmatched: set[str] = set()
    for group in (*groups, *_built_anyway(groups, g)):
        match = _LAYER.search(group.name)
        layer = int(match[1] or match[2]) if match else None
        is_draft = (layer is not None and layer >= g.layers) or group.name.startswith("mtp.") or ".mtp." in group.name
        if is_draft != draft:
            continue
        if not draft and not _on_stage(group.name, layer, layers, parallel, stage, g):
            continue
        if ".indexer." in group.name and layer is not None and layer < g.layers and layer not in g.indexer_layers:
            continue  # not built on layers that share another's indices
        if draft and (".shared_head.head." in group.name or "embed_tokens" in group.name):
            continue  # shared with the model's own
        tail = group.name if match is None else group.name[: match.start()] + group.name[match.end() - 1 :]
        rule = rule_for(tail)
        if rule is None:
            unmatched.add(tail)
        size = _on_rank(group, rule, g, parallel, sm, gptq)
        if not size:
            continue
        name = group.name
        for pattern, fused in _FUSED:
            name = pattern.sub(fused, name)
        blocks[name] = blocks.get(name, 0) + size
        if ".experts." in name and group.dtype == "F8_E4M3" and name.endswith("weight_scale"):
            swizzle += size
    rounding = _rounding(blocks.values())
    return Share(sum(blocks.values()), rounding, swizzle, max(blocks.values(), default=0), tuple(sorted(unmatched)))


def _built_anyway(groups: tuple[Group, ...], g: Geometry) -> Iterable[Group]:
    """The output head of a generating class that the checkpoint does not hold, as of embedding models: it is allocated
    all the same."""
    generates = g.architecture.endswith(("ForCausalLM", "ForConditionalGeneration"))
    if not generates or g.tied or any("lm_head" in group.name or _OUTPUT.search(group.name) for group in groups):
        return ()
    return (Group("lm_head.weight", "BF16", (g.vocab, g.hidden), 1, 2 * g.vocab * g.hidden),)


def _on_stage(name: str, layer: int | None, layers: range, parallel: Parallel, stage: int, g: Geometry) -> bool:
    if layer is not None:
        return layer in layers
    if g.tied and name.endswith("lm_head.weight"):
        return False
    if parallel.pp == 1:
        return True
    if g.tied and _EMBEDDING.search(name):
        # The last stage keeps a copy as its lm_head (models/qwen3.py, models/deepseek_v2.py).
        return stage in (0, parallel.pp - 1)
    if "lm_head" in name and heads_everywhere(g.architecture):
        return True
    if "lm_head" in name or re.search(r"(^|\.)(norm|ln_f)\.", name):
        return stage == parallel.pp - 1
    return stage == 0


def _on_rank(group: Group, rule: SplitRule | None, g: Geometry, parallel: Parallel, sm: int, gptq: bool) -> int:
    """Bytes of ``group`` on one rank, in the dtype that the engine keeps it in."""
    split = rule.split if rule else "full"
    if split == "skip":
        return 0
    total = _kept(group, rule, g) * group.count
    if split == "expert":
        return _expert(group, total, g, parallel, sm, gptq)
    if split == "vocab" and group.shape:
        return _vocabulary(group, total, g, parallel)
    if split == "norm":
        wide = group.shape and group.shape[0] > max(g.head_dim, g.v_head_dim)
        heads = g.kv_heads if "k_norm" in group.name else g.heads
        return total * max(1, heads // parallel.attn_tp) // heads if wide else total
    if not group.shape or split == "full" or (_per_channel(group) and _ROW_PARALLEL.search(group.name)):
        return total
    if split == "kv":
        return total * max(1, g.kv_heads // parallel.attn_tp) // g.kv_heads
    if split == "qkv":
        kv_local = max(1, g.kv_heads // parallel.attn_tp)
        return total * (g.heads // parallel.attn_tp + 2 * kv_local) // (g.heads + 2 * g.kv_heads)
    return -(-total // (parallel.attn_tp if split == "attn" else parallel.tp))


def _kept(group: Group, rule: SplitRule | None, g: Geometry) -> int:
    """Bytes of one tensor in the dtype that the engine keeps it in."""
    if _per_channel(group):
        # compressed_tensors_w8a8_fp8.py, compressed_tensors_w8a8_fp8_moe.py: one fp32 scale a row
        return group.shape[0] * 4
    if group.dtype not in _FLOATS or group.name.endswith(("_scale_2", "input_scale", "_scale_inv")):
        return group.size
    values = group.size // {"F32": 4, "F64": 8}.get(group.dtype, 2)
    if _FP32_GATE.search(group.name) and g.architecture in _FP32_GATES:
        return values * 4
    return group.size if rule and rule.keep32 else values * g.itemsize


def _per_channel(group: Group) -> bool:
    return group.name.endswith("weight_scale") and len(group.shape) == 2 and group.shape[1] == 1


def _vocabulary(group: Group, total: int, g: Geometry, parallel: Parallel) -> int:
    """Rows over all ranks, the embedding over those of one attention group (layers/vocab_parallel_embedding.py:
    use_attn_tp_group)."""
    head = "lm_head" in group.name or _OUTPUT.search(group.name)
    if not head and g.architecture in _WHOLE_EMBEDDING:
        return total
    ranks = parallel.attn_tp if not head or parallel.dp_lm_head else parallel.tp
    rows = group.shape[0]
    pad = 64 if -(-rows // 64) * 64 % ranks == 0 else 64 * ranks
    return total // rows * (-(-rows // pad) * pad) // ranks


def _expert(group: Group, total: int, g: Geometry, parallel: Parallel, sm: int, gptq: bool) -> int:
    """E/ep experts, their width over moe_tp. MXFP4 pads both widths to what the kernel takes
    (layers/quantization/mxfp4.py:create_weights): 64 of the inner width on SM90, 128 and 256 of hidden on SM120."""
    local = -(-total // parallel.ep)
    if not group.shape:
        return local
    if group.name.endswith(("_blocks", "_scales")) and g.family == "gpt_oss":
        inner = -(-g.moe_intermediate // parallel.moe_tp)
        step, hidden_step = (128, 256) if sm >= 100 else (64, 1)
        padded = round_up(inner, step)
        return int(local / g.moe_intermediate * padded / g.hidden * round_up(g.hidden, hidden_step))
    if group.name.endswith("down_proj_bias"):
        return local
    # gptq_moe.py, and a scale a row of fp8: of the second matrix each rank keeps the scales of all.
    whole = _SECOND.search(group.name) and (
        _per_channel(group) or (gptq and group.name.endswith((".scales", ".qzeros")))
    )
    return local if whole else -(-local // parallel.moe_tp)


def round_up(value: int, step: int) -> int:
    """The smallest multiple of ``step`` that is at least ``value``."""
    return -(-value // step) * step


def _rounding(sizes: Iterable[int]) -> int:
    """What torch's allocator takes beyond the tensors: large blocks rounded up, the others best fitted into 20 MiB
    segments. Three quarters of what that leaves open is what was read (0.09 of 0.09 GiB for Qwen3-30B at TP2, 0.02
    of 0.07 for Llama-8B at TP4)."""
    large = small = segments = held = 0
    remainders: list[int] = []
    for size in sizes:
        if size >= _LARGE:
            large += -size % _ROUND
        elif size > _MEDIUM:
            held += size
            at = bisect_left(remainders, size)
            if at < len(remainders):
                left = remainders.pop(at) - size
            else:
                segments += _SEGMENT
                left = _SEGMENT - size
            insort(remainders, left)
        else:
            small += -size % 512
    return large + (segments - held) * 3 // 4 + small + _ROUND
