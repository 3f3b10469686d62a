"""Which rank holds how much of each tensor, and what the engine keeps beside the checkpoint's tensors.

Rules are a table by name; the first that matches decides. Sources are files of sglang/srt 0.5.23.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from ..checkpoint.geometry import Geometry
from ..checkpoint.model import Group


@dataclass(frozen=True)
class Parallel:
    """World layout of one replica. Rank r is pipeline stage r // tp, tensor rank r % tp; node n of ``nodes`` runs the
    n-th of equal shares of the ranks (entrypoints/engine.py:_calculate_rank_ranges). ``partition``: layers of each
    stage where SGLANG_PP_LAYER_PARTITION says them."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    nodes: int = 1
    partition: tuple[int, ...] = ()

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
        r"(^|\.)visual\.(blocks|merger).*\.(qkv|proj|linear_fc1|linear_fc2)\.weight$", "attn", "models/qwen3_vl.py"
    ),
    SplitRule(
        r"(^|\.)(visual|vision_tower|vision_model|mm_projector|audio_tower)\.", "full", "multimodal towers: whole"
    ),
    SplitRule(r"\.shared_head\.|\.eh_proj|\.enorm|\.hnorm", "full", "models/deepseek_nextn.py"),
    SplitRule(r"\.experts\.", "expert", "layers/moe/fused_moe_triton/layer.py"),
    SplitRule(r"\.shared_expert_gate\.", "full", "models/qwen2_moe.py"),
    SplitRule(r"\.(gate|router)\.(weight|bias)$", "full", "models/deepseek_v2.py:MoEGate"),
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
        r"(^|\.)(embed_tokens|lm_head|wte|word_embeddings|output)\.weight$",
        "vocab",
        "layers/vocab_parallel_embedding.py",
    ),
    SplitRule(r"(position|token_type)_embeddings\.weight$", "vocab", "models/bert.py"),
    SplitRule(r"(^|\.)(wpe|ln_f|ln_1|ln_2|norm|LayerNorm)\.|layernorm|_norm\.", "full", "norms and GPT-2's positions"),
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
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings)\.weight$")
_FLOATS = {"BF16", "F16", "F32", "F64"}
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
    groups: Iterable[Group], g: Geometry, parallel: Parallel, stage: int, *, sm: int, draft: bool = False
) -> Share:
    """What one rank of ``stage`` holds. ``draft``: the MTP layers instead of the model's own."""
    layers = parallel.layers(g.layers, stage)
    blocks: dict[str, int] = {}
    swizzle = 0
    unmatched: set[str] = set()
    for group in groups:
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
        size = _on_rank(group, rule, g, parallel, sm)
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
    if "lm_head" in name or re.search(r"(^|\.)(norm|ln_f)\.", name):
        return stage == parallel.pp - 1
    return stage == 0


def _on_rank(group: Group, rule: SplitRule | None, g: Geometry, parallel: Parallel, sm: int) -> int:
    """Bytes of ``group`` on one rank, in the dtype that the engine keeps it in."""
    size = group.size
    split = rule.split if rule else "full"
    if (
        group.dtype in _FLOATS
        and not (rule and rule.keep32)
        and not group.name.endswith(("_scale_2", "input_scale", "_scale_inv"))
    ):
        size = group.size * g.itemsize // {"F32": 4, "F64": 8}.get(group.dtype, 2)
    total = size * group.count
    if split == "skip":
        return 0
    if split == "expert":
        return _expert(group, total, g, parallel, sm)
    if split == "vocab" and group.shape:
        rows = group.shape[0]
        pad = 64 if -(-rows // 64) * 64 % parallel.tp == 0 else 64 * parallel.tp
        return total // rows * (-(-rows // pad) * pad) // parallel.tp
    if split == "norm":
        wide = group.shape and group.shape[0] > max(g.head_dim, g.v_head_dim)
        heads = g.kv_heads if "k_norm" in group.name else g.heads
        return total * max(1, heads // parallel.attn_tp) // heads if wide else total
    if not group.shape or split == "full":
        return total
    if split == "kv":
        return total * max(1, g.kv_heads // parallel.attn_tp) // g.kv_heads
    if split == "qkv":
        kv_local = max(1, g.kv_heads // parallel.attn_tp)
        return total * (g.heads // parallel.attn_tp + 2 * kv_local) // (g.heads + 2 * g.kv_heads)
    return -(-total // (parallel.attn_tp if split == "attn" else parallel.tp))


def _expert(group: Group, total: int, g: Geometry, parallel: Parallel, sm: int) -> int:
    """E/ep experts, their width over moe_tp. MXFP4 pads both widths to what the kernel takes
    (layers/quantization/mxfp4.py:create_weights): 64 of the inner width on SM90, 128 and 256 of hidden on SM120."""
    local = -(-total // parallel.ep)
    if not group.shape:
        return local
    if group.name.endswith(("_blocks", "_scales")) and g.family == "gpt_oss":
        inner = -(-g.moe_intermediate // parallel.moe_tp)
        step, hidden_step = (128, 256) if sm >= 120 else (128, 128) if sm >= 100 else (64, 1)
        padded = round_up(inner, step)
        return int(local / g.moe_intermediate * padded / g.hidden * round_up(g.hidden, hidden_step))
    if group.name.endswith("down_proj_bias"):
        return local
    return -(-local // parallel.moe_tp)


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
