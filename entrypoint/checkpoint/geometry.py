"""config.json as the handful of numbers that tensors, KV cache and kernels follow from. Pure, and never raises:
a config that says nothing of something gets the smallest sensible value and `known` tells how far to trust it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import layer_kinds
from .layer_kinds import LayerKinds
from .numbers import number, whole

# Architecture -> how its tensors are named and laid out (`tensors.py`). Those that are absent are
# planned from what their config says, marked as a guess.
FAMILIES: dict[str, str] = {
    "GlmMoeDsaForCausalLM": "deepseek",
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
    "DeepseekV32ForCausalLM": "deepseek",
    "KimiK2ForCausalLM": "deepseek",
    "KimiK25ForConditionalGeneration": "deepseek",
    "Glm4MoeForCausalLM": "llama",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "llama",
    "Qwen2MoeForCausalLM": "llama",
    "Qwen3ForCausalLM": "llama",
    "Qwen3MoeForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "MiniMaxM2ForCausalLM": "llama",
    "GptOssForCausalLM": "gpt_oss",
    "Qwen3NextForCausalLM": "qwen_hybrid",
    "Qwen3_5ForConditionalGeneration": "qwen_hybrid",
    "Qwen3_5MoeForConditionalGeneration": "qwen_hybrid",
    "Qwen3_5MoeForCausalLM": "qwen_hybrid",
    "GPT2LMHeadModel": "gpt2",
    "BertModel": "bert",
    "BertForSequenceClassification": "bert",
    "Contriever": "bert",
    "XLMRobertaModel": "bert",
    "XLMRobertaForSequenceClassification": "bert",
}

# sglang configs/model_config.py:is_deepseek_dsa, the text models among them.
_DSA = {
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "MistralLarge3ForCausalLM",
    "PixtralForConditionalGeneration",
    "GlmMoeDsaForCausalLM",
    "Glm5NextForConditionalGeneration",
    "LongcatFlashForCausalLM",
    "Dots3NoteForCausalLM",
    "HYV4ForCausalLM",
}
# Served without their encoders unless --enable-multimodal asks for them (configs/model_config.py: mm_disabled_models).
_TEXT_ALONE = {
    "Gemma3ForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "Step3VLForConditionalGeneration",
    "InklingForConditionalGeneration",
}
# Tensors of these are known from headers alone: nothing here generates their towers, or their layers.
KNOWN_BY_HEADERS = {
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "NemotronHForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
}
_SENSES = re.compile(r"vision|audio|visual|image|speech")
MOST_LAYERS = 4096  # more are no model; tensors are generated one layer at a time
LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers")
_BIASED = {"Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "GptOssForCausalLM"}
_ITEMSIZE = {"float64": 8, "float32": 2, "float16": 2, "half": 2, "bfloat16": 2, "float": 2}


@dataclass(frozen=True)
class Geometry:
    """Counts and widths; bytes nowhere but ``itemsize``, the model dtype's (sglang runs float32 models in half).
    ``pictures``: by what the engine multiplies its own fraction of static memory, to leave room for an encoder."""

    architecture: str
    family: str
    known: bool
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    intermediate: int
    vocab: int
    max_position: int
    rotary_dim: int
    tied: bool
    itemsize: int
    attention_bias: bool
    qk_norm: str  # "", "head" or "full"
    # multi-head latent attention
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    # mixture of experts
    experts: int
    topk: int
    moe_intermediate: int
    shared_intermediate: int
    moe_layers: frozenset[int]
    nextn: int
    # DeepSeek sparse attention
    dsa: bool
    index_heads: int
    index_head_dim: int
    index_kpool: int
    indexer_layers: frozenset[int]
    kinds: LayerKinds
    ssm_itemsize: int
    multimodal: bool
    pictures: float
    vision: tuple[int, ...]  # depth, width, inner width, values of a patch, positions, merged width
    index_topk: int = 0  # positions that sparse attention reads

    @property
    def mla(self) -> bool:
        """True for multi-head latent attention."""
        return self.kv_lora > 0

    @property
    def moe(self) -> bool:
        """True when at least one layer is a mixture of experts."""
        return bool(self.moe_layers)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a multimodal config, else the config itself."""
    for key in ("text_config", "language_config", "llm_config", "thinker_config"):
        part = config.get(key)
        if isinstance(part, Mapping) and part.get("hidden_size"):
            return part
    return config


def lacks(config: Mapping[str, Any], architecture: str) -> str | None:
    """What a config must say for any plan to mean something, when it does not. Layers may stand in a nested
    config of a name that is not known here, never in an encoder's for pictures or sound."""
    if not architecture:
        return "architectures"
    nested = [part for key, part in config.items() if isinstance(part, Mapping) and not _SENSES.search(key)]
    has = any(whole(part, *LAYER_KEYS) for part in (text_config(config), config, *nested))
    return None if has else "num_hidden_layers"


def of(config: Mapping[str, Any], architecture: str) -> Geometry:
    """The geometry that ``config`` (config.json) describes."""
    text = text_config(config)
    family = FAMILIES.get(architecture, "")
    layers = min(MOST_LAYERS, whole(text, *LAYER_KEYS, default=1))
    hidden = whole(text, "hidden_size", "n_embd", "d_model", default=1024)
    heads = whole(text, "num_attention_heads", "n_head", default=max(1, hidden // 128))
    kv_lora = whole(text, "kv_lora_rank")
    head_dim = whole(text, "head_dim", default=max(1, hidden // heads))
    rope = whole(text, "qk_rope_head_dim")
    partial = number(text.get("partial_rotary_factor") or _rope(text).get("partial_rotary_factor"), 1.0)
    experts = whole(text, "n_routed_experts", "num_local_experts", "num_experts")
    moe_intermediate = whole(text, "moe_intermediate_size", "intermediate_size")
    kinds = layer_kinds.of(text, architecture, layers)
    dsa = architecture in _DSA and kv_lora > 0 and text.get("index_topk") is not None
    return Geometry(
        architecture=architecture,
        family=family or ("deepseek" if kv_lora else "qwen_hybrid" if kinds.linear else "llama"),
        known=bool(family),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=min(heads, whole(text, "num_key_value_heads", "num_kv_heads", default=heads)),
        head_dim=head_dim,
        v_head_dim=whole(text, "v_head_dim", default=head_dim),
        intermediate=whole(
            text, "intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden
        ),
        vocab=whole(text, "vocab_size", default=32000),
        max_position=max_position(text),
        rotary_dim=rope if kv_lora else whole(text, "rotary_dim", default=int(head_dim * partial)),
        tied=_tied(config, text, family),
        itemsize=_ITEMSIZE.get(dtype(config, text), 2),
        attention_bias=bool(text.get("attention_bias", architecture in _BIASED)),
        qk_norm=_qk_norm(text, architecture),
        q_lora=whole(text, "q_lora_rank"),
        kv_lora=kv_lora,
        nope=whole(text, "qk_nope_head_dim"),
        rope=rope,
        experts=experts,
        topk=whole(text, "num_experts_per_tok", "experts_per_token", "top_k", default=1),
        moe_intermediate=moe_intermediate,
        shared_intermediate=whole(text, "shared_expert_intermediate_size")
        or whole(text, "n_shared_experts") * moe_intermediate,
        moe_layers=_moe_layers(text, layers, kinds) if experts else frozenset(),
        nextn=min(MOST_LAYERS, whole(text, "num_nextn_predict_layers", "mtp_num_hidden_layers")),
        dsa=dsa,
        index_heads=whole(text, "index_n_heads"),
        index_head_dim=whole(text, "index_head_dim"),
        index_kpool=whole(text, "index_kpool", default=1),
        indexer_layers=frozenset(i for i in range(layers) if not _skips_topk(text, i)) if dsa else frozenset(),
        kinds=kinds,
        ssm_itemsize=2 if str(text.get("mamba_ssm_dtype")) in ("bfloat16", "float16") else 4,
        multimodal="vision_config" in config and architecture not in _TEXT_ALONE,
        pictures=_pictures(config.get("vision_config")) if architecture not in _TEXT_ALONE else 1.0,
        vision=_vision(config.get("vision_config")),
        index_topk=whole(text, "index_topk"),
    )


def _pictures(vision: Any) -> float:
    """arg_groups/memory_hook.py:adjust_mem_fraction_for_vlm: a tower of 24 layers of 1,024 gives 0.95, a larger one
    less. Towers that say ``depth`` count as 24 layers there."""
    if not isinstance(vision, Mapping):
        return 1.0
    wide = whole(vision, "hidden_size", default=1024)
    size = whole(vision, "num_hidden_layers", default=24) * wide * wide / (24 * 1024 * 1024)
    return 0.95 * max(0.8, min(1.05, 1.0 - 0.1 * (size - 1.0)))


def _vision(vision: Any) -> tuple[int, ...]:
    if not isinstance(vision, Mapping) or not whole(vision, "depth"):
        return ()
    wide = whole(vision, "hidden_size", default=1152)
    patch = whole(vision, "in_channels", default=3) * whole(vision, "temporal_patch_size", default=2)
    merge = whole(vision, "spatial_merge_size", default=2)
    return (
        min(MOST_LAYERS, whole(vision, "depth")),
        wide,
        whole(vision, "intermediate_size", default=4 * wide),
        patch * whole(vision, "patch_size", default=16) ** 2,
        whole(vision, "num_position_embeddings", default=2304),
        wide * merge * merge,
    )


def max_position(text: Mapping[str, Any]) -> int:
    """Positions that the model was made for, before any rope scaling."""
    return whole(text, "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", default=2048)


def _rope(text: Mapping[str, Any]) -> Mapping[str, Any]:
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    return rope if isinstance(rope, Mapping) else {}


def dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """The dtype that a config names for its activations, ``bfloat16`` where it names none."""
    for source in (text, config):
        for key in ("torch_dtype", "dtype"):
            if isinstance(source.get(key), str):
                return str(source[key]).removeprefix("torch.")
    return "bfloat16"


def _tied(config: Mapping[str, Any], text: Mapping[str, Any], family: str) -> bool:
    """transformers' PretrainedConfig ties by default; the big language models' own classes do not."""
    value = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    return bool(value) if isinstance(value, bool) else family == "gpt2"


def _qk_norm(text: Mapping[str, Any], architecture: str) -> str:
    if text.get("use_qk_norm"):
        return "full" if text.get("qk_norm_type", "per_layer") == "per_layer" and "MiniMax" in architecture else "head"
    return "head" if architecture.startswith("Qwen3") else ""


def _moe_layers(text: Mapping[str, Any], layers: int, kinds: LayerKinds) -> frozenset[int]:
    """Layers whose MLP is a mixture (deepseek_v2.py, qwen3_moe.py, glm4_moe.py)."""
    if kinds.experts is not None:
        return kinds.experts
    first = int(number(text.get("first_k_dense_replace"), 0))
    every = int(number(text.get("moe_layer_freq"), 1)) or 1
    # interleave_moe_layer_step: models/llama4.py
    step = int(number(text.get("decoder_sparse_step") or text.get("interleave_moe_layer_step"), 1)) or 1
    dense = text.get("mlp_only_layers")
    only = {x for x in dense if isinstance(x, int)} if isinstance(dense, list) else set()
    return frozenset(i for i in range(first, layers) if i % every == 0 and (i + 1) % step == 0 and i not in only)


def _skips_topk(text: Mapping[str, Any], layer: int) -> bool:
    """configs/model_config.py:dsa_layer_skips_topk: such a layer owns no indexer and no index cache."""
    types = text.get("indexer_types")
    if isinstance(types, list):
        return layer < len(types) and types[layer] == "shared"
    factor = int(number(text.get("cli_factor"), 1))
    if factor > 1:
        return layer % factor != 0
    pattern = text.get("index_topk_pattern")
    if isinstance(pattern, str):
        return layer < len(pattern) and pattern[layer] == "S"
    frequency = int(number(text.get("index_topk_freq"), 1)) or 1
    offset = text.get("index_skip_topk_offset")
    start = layer - 1 if offset is None else layer - int(number(offset, 1)) + 1
    return max(start, 0) % frequency != 0
