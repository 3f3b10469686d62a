"""The tensors of a checkpoint that has only a config.json, from the architecture's table.

One row per tensor: name, shape, and whether a quantisation takes it. Names are those of published checkpoints,
so that the sharding rules are the same for real headers and generated ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from . import quantization as quantization_of
from .geometry import Geometry

ITEMSIZE = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1, "I8": 1, "I32": 4}
_FLOAT = "BF16"


class Row(NamedTuple):
    """``copies`` tensors of one shape. ``linear``: a quantised checkpoint may hold it in fewer bits."""

    name: str
    shape: tuple[int, ...]
    copies: int = 1
    linear: bool = False
    dtype: str = _FLOAT


class Tensor(NamedTuple):
    """``copies`` tensors as a checkpoint stores them; ``dtype`` is safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    copies: int


def generate(geometry: Geometry, quantization: Mapping[str, Any]) -> list[Tensor]:
    """Every tensor of the model, layer by layer; the MTP layers that the config announces included."""
    how = quantization_of.method(quantization)
    ignored = quantization_of.ignored(quantization)
    found: list[Tensor] = []
    for row in _rows(geometry):
        module = row.name.removesuffix(".weight").replace(".*", ".0")
        if row.linear and how and not quantization_of.is_ignored(module, ignored) and row.name.endswith(".weight"):
            found += _quantised(row, how, quantization)
        else:
            found.append(Tensor(row.name, row.dtype, row.shape, row.copies))
    return found


def _quantised(row: Row, how: str, quantization: Mapping[str, Any]) -> Iterator[Tensor]:
    stem, (n, k), count = row.name.removesuffix(".weight"), row.shape, row.copies
    if how == "modelopt_fp4":
        yield Tensor(f"{stem}.weight", "U8", (n, k // 2), count)
        yield Tensor(f"{stem}.weight_scale", "F8_E4M3", (n, k // 16), count)
        yield Tensor(f"{stem}.weight_scale_2", "F32", (), count)
        yield Tensor(f"{stem}.input_scale", "F32", (), count)
    elif how == "fp8" and (block := _block(quantization.get("weight_block_size"))):
        yield Tensor(f"{stem}.weight", "F8_E4M3", (n, k), count)
        yield Tensor(f"{stem}.weight_scale_inv", "F32", (-(-n // block[0]), -(-k // block[1])), count)
    elif how in ("fp8", "modelopt_fp8"):
        yield Tensor(f"{stem}.weight", "F8_E4M3", (n, k), count)
        yield Tensor(f"{stem}.weight_scale", "F32", (), count)
        yield Tensor(f"{stem}.input_scale", "F32", (), count)
    elif how == "compressed-tensors":
        yield Tensor(f"{stem}.weight_packed", "I32", (n, k // 8), count)
        yield Tensor(f"{stem}.weight_scale", _FLOAT, (n, -(-k // 32)), count)
    elif how in ("awq", "gptq", "gptq_marlin", "awq_marlin"):
        yield Tensor(f"{stem}.qweight", "I32", (k // 8, n), count)
        yield Tensor(f"{stem}.scales", "F16", (-(-k // 128), n), count)
    else:  # a method without a row here: planned at full width, which is never too little
        yield Tensor(row.name, row.dtype, row.shape, count)


def _block(value: Any) -> tuple[int, int] | None:
    """Rows and columns that share a scale, when the config gives two positive numbers."""
    ok = isinstance(value, list) and len(value) == 2 and all(isinstance(x, int) and x > 0 for x in value)
    return (value[0], value[1]) if ok else None


def _rows(g: Geometry) -> Iterator[Row]:
    if g.family in ("gpt2", "bert"):
        yield from (_gpt2(g) if g.family == "gpt2" else _bert(g))
        return
    model = "model.language_model" if g.family == "qwen_hybrid" and g.multimodal else "model"
    if "KimiK25" in g.architecture:
        model = "language_model.model"
    if g.family == "qwen_hybrid" and g.vision:
        yield from _vision(g)
    yield Row(f"{model}.embed_tokens.weight", (g.vocab, g.hidden))
    for i in range(g.layers + (g.nextn if g.family == "deepseek" else 0)):
        at = f"{model}.layers.{i}"
        yield Row(f"{at}.input_layernorm.weight", (g.hidden,))
        yield Row(f"{at}.post_attention_layernorm.weight", (g.hidden,))
        if i in g.kinds.linear:
            yield from _gated_delta_net(g, at)
        else:
            yield from (_latent_attention(g, at, i) if g.mla else _attention(g, at))
        if g.family == "gpt_oss":
            yield from _gpt_oss_experts(g, at)
        elif i in g.moe_layers or (i >= g.layers and g.moe):
            yield from _mixture(g, at)
        else:
            yield from _mlp(f"{at}.mlp", g.hidden, g.intermediate)
        if i >= g.layers:
            yield Row(f"{at}.eh_proj.weight", (g.hidden, 2 * g.hidden))
            for name in ("enorm", "hnorm", "shared_head.norm"):
                yield Row(f"{at}.{name}.weight", (g.hidden,))
    yield Row(f"{model}.norm.weight", (g.hidden,))
    if not g.tied:
        yield Row(
            "lm_head.weight" if "KimiK25" not in g.architecture else "language_model.lm_head.weight",
            (g.vocab, g.hidden),
        )


def _attention(g: Geometry, at: str) -> Iterator[Row]:
    q, k, v = g.heads * g.head_dim, g.kv_heads * g.head_dim, g.kv_heads * g.v_head_dim
    gate = 2 if g.family == "qwen_hybrid" else 1  # the query's output gate stands in q_proj
    for name, width in (("q_proj", q * gate), ("k_proj", k), ("v_proj", v)):
        yield Row(f"{at}.self_attn.{name}.weight", (width, g.hidden), linear=True)
        if g.attention_bias:
            yield Row(f"{at}.self_attn.{name}.bias", (width,))
    yield Row(f"{at}.self_attn.o_proj.weight", (g.hidden, g.heads * g.v_head_dim), linear=True)
    if g.family == "gpt_oss":
        yield Row(f"{at}.self_attn.o_proj.bias", (g.hidden,))
        yield Row(f"{at}.self_attn.sinks", (g.heads,))
    if g.qk_norm or g.family == "qwen_hybrid":
        full = g.qk_norm == "full"
        yield Row(f"{at}.self_attn.q_norm.weight", (q if full else g.head_dim,))
        yield Row(f"{at}.self_attn.k_norm.weight", (k if full else g.head_dim,))


def _latent_attention(g: Geometry, at: str, layer: int) -> Iterator[Row]:
    attn, qk = f"{at}.self_attn", g.nope + g.rope
    if g.q_lora:
        yield Row(f"{attn}.q_a_proj.weight", (g.q_lora, g.hidden), linear=True)
        yield Row(f"{attn}.q_a_layernorm.weight", (g.q_lora,))
        yield Row(f"{attn}.q_b_proj.weight", (g.heads * qk, g.q_lora), linear=True)
    else:
        yield Row(f"{attn}.q_proj.weight", (g.heads * qk, g.hidden), linear=True)
    yield Row(f"{attn}.kv_a_proj_with_mqa.weight", (g.kv_lora + g.rope, g.hidden), linear=True)
    yield Row(f"{attn}.kv_a_layernorm.weight", (g.kv_lora,))
    yield Row(f"{attn}.kv_b_proj.weight", (g.heads * (g.nope + g.v_head_dim), g.kv_lora), linear=True)
    yield Row(f"{attn}.o_proj.weight", (g.hidden, g.heads * g.v_head_dim), linear=True)
    if g.dsa and (layer in g.indexer_layers or layer >= g.layers):
        yield Row(f"{attn}.indexer.wq_b.weight", (g.index_heads * g.index_head_dim, g.q_lora), linear=True)
        yield Row(f"{attn}.indexer.wk.weight", (g.index_head_dim, g.hidden), linear=True)
        yield Row(f"{attn}.indexer.weights_proj.weight", (g.index_heads, g.hidden))
        for part in ("weight", "bias"):
            yield Row(f"{attn}.indexer.k_norm.{part}", (g.index_head_dim,), dtype="F32")


def _gated_delta_net(g: Geometry, at: str) -> Iterator[Row]:
    state = g.kinds.state
    key, value = state.groups * state.size, state.heads * state.head_dim
    attn = f"{at}.linear_attn"
    yield Row(f"{attn}.in_proj_qkv.weight", (2 * key + value, g.hidden), linear=True)
    yield Row(f"{attn}.in_proj_z.weight", (value, g.hidden), linear=True)
    for name in ("in_proj_b", "in_proj_a"):
        yield Row(f"{attn}.{name}.weight", (state.heads, g.hidden), linear=True)
    yield Row(f"{attn}.conv1d.weight", (2 * key + value, 1, state.kernel))
    yield Row(f"{attn}.A_log", (state.heads,), dtype="F32")
    yield Row(f"{attn}.dt_bias", (state.heads,))
    yield Row(f"{attn}.norm.weight", (state.head_dim,))
    yield Row(f"{attn}.out_proj.weight", (g.hidden, value), linear=True)


def _vision(g: Geometry) -> Iterator[Row]:
    """models/qwen3_vl.py"""
    depth, wide, inner, patch, places, merged = g.vision
    yield Row("model.visual.patch_embed.proj.weight", (wide, patch))
    yield Row("model.visual.pos_embed.weight", (places, wide))
    for i in range(depth):
        at = f"model.visual.blocks.{i}"
        for name, shape in (
            ("attn.qkv", (3 * wide, wide)),
            ("attn.proj", (wide, wide)),
            ("mlp.linear_fc1", (inner, wide)),
            ("mlp.linear_fc2", (wide, inner)),
        ):
            yield Row(f"{at}.{name}.weight", shape)
            yield Row(f"{at}.{name}.bias", (shape[0],))
    yield Row("model.visual.merger.linear_fc1.weight", (merged, merged))
    yield Row("model.visual.merger.linear_fc2.weight", (g.hidden, merged))


def _mlp(at: str, hidden: int, width: int) -> Iterator[Row]:
    for name in ("gate_proj", "up_proj"):
        yield Row(f"{at}.{name}.weight", (width, hidden), linear=True)
    yield Row(f"{at}.down_proj.weight", (hidden, width), linear=True)


def _mixture(g: Geometry, at: str) -> Iterator[Row]:
    minimax = "MiniMax" in g.architecture or "Mixtral" in g.architecture
    mlp = f"{at}.block_sparse_moe" if minimax else f"{at}.mlp"
    yield Row(f"{mlp}.gate.weight", (g.experts, g.hidden))
    if g.family == "deepseek" or "Glm4Moe" in g.architecture or "MiniMax" in g.architecture:
        inside = "" if minimax else "gate."
        yield Row(f"{mlp}.{inside}e_score_correction_bias", (g.experts,), dtype="F32")
    for name, shape in (
        ("w1" if minimax else "gate_proj", (g.moe_intermediate, g.hidden)),
        ("w3" if minimax else "up_proj", (g.moe_intermediate, g.hidden)),
        ("w2" if minimax else "down_proj", (g.hidden, g.moe_intermediate)),
    ):
        yield Row(f"{mlp}.experts.*.{name}.weight", shape, g.experts, linear=True)
    if g.shared_intermediate:
        shared = (
            "shared_expert"
            if g.family in ("qwen_hybrid", "llama") and "Glm4" not in g.architecture
            else "shared_experts"
        )
        yield from _mlp(f"{mlp}.{shared}", g.hidden, g.shared_intermediate)
        if shared == "shared_expert":
            yield Row(f"{mlp}.shared_expert_gate.weight", (1, g.hidden))


def _gpt_oss_experts(g: Geometry, at: str) -> Iterator[Row]:
    """As published: MXFP4 blocks of 32 with one scale byte each; all experts in one tensor."""
    mlp, e, i, h = f"{at}.mlp", g.experts, g.moe_intermediate, g.hidden
    yield Row(f"{mlp}.router.weight", (e, h))
    yield Row(f"{mlp}.router.bias", (e,))
    for name, n, k in (("gate_up_proj", 2 * i, h), ("down_proj", h, i)):
        yield Row(f"{mlp}.experts.{name}_blocks", (e, n, k // 32, 16), dtype="U8")
        yield Row(f"{mlp}.experts.{name}_scales", (e, n, k // 32), dtype="U8")
        yield Row(f"{mlp}.experts.{name}_bias", (e, n))


def _gpt2(g: Geometry) -> Iterator[Row]:
    yield Row("wte.weight", (g.vocab, g.hidden))
    yield Row("wpe.weight", (g.max_position, g.hidden))
    for i in range(g.layers):
        for name, shape in (
            ("attn.c_attn", (g.hidden, 3 * g.hidden)),
            ("attn.c_proj", (g.hidden, g.hidden)),
            ("mlp.c_fc", (g.hidden, g.intermediate)),
            ("mlp.c_proj", (g.intermediate, g.hidden)),
        ):
            yield Row(f"h.{i}.{name}.weight", shape)
            yield Row(f"h.{i}.{name}.bias", (shape[1],))
        for name in ("ln_1", "ln_2"):
            yield Row(f"h.{i}.{name}.weight", (g.hidden,))
            yield Row(f"h.{i}.{name}.bias", (g.hidden,))
    yield Row("ln_f.weight", (g.hidden,))
    yield Row("ln_f.bias", (g.hidden,))


def _bert(g: Geometry) -> Iterator[Row]:
    for name, rows in (("word", g.vocab), ("position", g.max_position), ("token_type", 2)):
        yield Row(f"embeddings.{name}_embeddings.weight", (rows, g.hidden))
    for i in range(g.layers):
        at = f"encoder.layer.{i}"
        for name, shape in (
            ("attention.self.query", (g.hidden, g.hidden)),
            ("attention.self.key", (g.hidden, g.hidden)),
            ("attention.self.value", (g.hidden, g.hidden)),
            ("attention.output.dense", (g.hidden, g.hidden)),
            ("intermediate.dense", (g.intermediate, g.hidden)),
            ("output.dense", (g.hidden, g.intermediate)),
        ):
            yield Row(f"{at}.{name}.weight", shape)
            yield Row(f"{at}.{name}.bias", (shape[0],))


def config_quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """quantization_config of config.json, wherever a multimodal config keeps it."""
    for source in (config, config.get("text_config")):
        if isinstance(source, Mapping):
            for key in ("quantization_config", "compression_config"):
                if isinstance(source.get(key), Mapping):
                    return dict(source[key])
    return {}
