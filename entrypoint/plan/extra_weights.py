"""What the engine keeps on the GPU as "weights" beside the checkpoint's tensors, named one by one."""

from __future__ import annotations

from ..checkpoint.geometry import Geometry, text_config
from ..checkpoint.model import Checkpoint, Group
from ..checkpoint.numbers import number
from .sharding import Parallel, round_up

# SGLANG_ROPE_CACHE_SAFETY_MARGIN, SGLANG_ROPE_CACHE_ALIGN (environ.py)
_ROPE_MARGIN, _ROPE_ALIGN = 256, 128


def latent_copies(g: Geometry, parallel: Parallel, layers: int) -> int:
    """MLA's w_kc and w_vc: kv_b_proj once more in the model dtype, kv_b_proj itself stays
    (models/deepseek_common/deepseek_weight_loader.py:post_load_weights)."""
    if not g.mla:
        return 0
    heads = max(1, g.heads // parallel.attn_tp)
    return layers * heads * (g.nope + g.v_head_dim) * g.kv_lora * g.itemsize


def latent_dequantised(g: Geometry, groups: tuple[Group, ...], parallel: Parallel, layers: int) -> int:
    """An FP8 kv_b_proj is dequantised before it is split, and that copy stays too: measured on SM90, 19.84 GiB
    for 8 layers of DeepSeek-V3 where tensors, table and the two copies make 19.59."""
    fp8 = any(x.dtype == "F8_E4M3" and x.name.endswith("kv_b_proj.weight") for x in groups)
    return latent_copies(g, parallel, layers) if fp8 else 0


def mxfp4_swizzle(g: Geometry, parallel: Parallel, layers: int, sm: int) -> int:
    """On SM90 triton_kernels keeps MXFP4 experts in a padded layout of its own, the raw scales stay, and the
    next layer's w2 takes a part of the freed raw w13, whose rest can never be given back (layers/quantization/
    mxfp4.py:_swizzle_mxfp4, triton_kernels hopper_value.py, hopper_scale.py; gpt-oss-20b reads 16.82 GiB)."""
    if g.family != "gpt_oss" or sm != 90:
        return 0
    experts = -(-g.experts // parallel.ep)
    inner = round_up(-(-g.moe_intermediate // parallel.moe_tp), 64)
    extra = 0
    for n, k in ((2 * inner, g.hidden), (g.hidden, inner)):
        value, scale = _hopper(n, k)
        extra += value - n * k // 2 + scale
    return layers * experts * extra


def mxfp4_fragments(g: Geometry, parallel: Parallel, layers: int, sm: int) -> int:
    """What the swizzle on SM90 leaves split in the allocator's hands while there is room: the next layer's w2 takes a
    part of the freed raw w13. Where memory is short the allocator gives its whole cached blocks back first."""
    if g.family != "gpt_oss" or sm != 90:
        return 0
    experts = -(-g.experts // parallel.ep)
    inner = round_up(-(-g.moe_intermediate // parallel.moe_tp), 64)
    value, _ = _hopper(g.hidden, inner)
    return layers * experts * max(0, inner * g.hidden - value)


def _hopper(n: int, k: int) -> tuple[int, int]:
    """(values, scales) of one matrix in triton_kernels' padded layout, in bytes (hopper_value.py, hopper_scale.py)."""
    return round_up(n, 256) * round_up(k // 2, 64), round_up(n, 256) * (round_up(k, 128) // 32)


def rope_table(g: Geometry, checkpoint: Checkpoint, context: int) -> int:
    """One fp32 cos/sin table, shared by all layers, long enough for the context and a margin
    (layers/rotary_embedding/base.py; utils/common.py:reserve_rope_cache_for_long_sequences)."""
    if g.family in ("gpt2", "bert") or not g.rotary_dim:
        return 0
    text = text_config(checkpoint.config)
    scaling = text.get("rope_scaling") or text.get("rope_parameters")
    made = g.max_position
    if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) == "yarn":
        original = number(scaling.get("original_max_position_embeddings"), g.max_position)
        made = int(original * number(scaling.get("factor"), 1))
    needed = -(-(context + _ROPE_MARGIN) // _ROPE_ALIGN) * _ROPE_ALIGN
    return max(made, needed) * g.rotary_dim * 4


def scale_copies(groups: tuple[Group, ...], g: Geometry, parallel: Parallel) -> int:
    """Swizzled NVFP4 scales that cannot alias the checkpoint's: both stay when a width is not a multiple of the
    swizzle's tile (layers/quantization/modelopt_quant.py:process_weights_after_loading)."""
    scales = [x for x in groups if ".experts." in x.name and x.name.endswith("weight_scale") and x.dtype == "F8_E4M3"]
    if not scales:
        return 0
    inner = g.moe_intermediate // parallel.moe_tp
    if 2 * inner % 128 == 0 and g.hidden % 128 == 0 and g.hidden // 16 % 4 == 0 and inner // 16 % 4 == 0:
        return 0
    return sum(x.bytes for x in scales) // parallel.ep // parallel.moe_tp
