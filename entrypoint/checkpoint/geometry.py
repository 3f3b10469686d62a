"""config.json as the handful of numbers that tensors, KV cache and kernels follow from. Pure, and never raises:
a config that says nothing of something gets the smallest sensible value and `known` tells how far to trust it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
# sglang configs/model_config.py:is_hybrid_swa_model and get_hybrid_layer_ids: a KV pool of its own for the sliding
# layers. Other models with a sliding window keep one pool.
_SWA_BY_LAYER_TYPES = {
    "GptOssForCausalLM",
    "Step3p5ForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "LagunaForCausalLM",
    "MellumForCausalLM",
}
_SENSES = re.compile(r"vision|audio|visual|image|speech")
_LARGEST = 1 << 48
MOST_LAYERS = 4096  # more are no model; tensors are generated one layer at a time
LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers")
_BIASED = {"Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "GptOssForCausalLM"}
_ITEMSIZE = {"float64": 8, "float32": 2, "float16": 2, "half": 2, "bfloat16": 2, "float": 2}


@dataclass(frozen=True)
class Geometry:
    """Counts and widths; bytes nowhere but ``itemsize``, the model dtype's (sglang runs float32 models in half)."""

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
    # sliding window with a pool of its own; linear attention
    sliding_layers: frozenset[int]
    linear_layers: frozenset[int]
    linear_key_heads: int
    linear_value_heads: int
    linear_key_dim: int
    linear_value_dim: int
    conv_kernel: int
    ssm_itemsize: int
    multimodal: bool
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


def number(value: Any, default: float) -> float:
    """``value`` when it is a positive number that a size can be, else ``default``: configs hold nulls, lists,
    strings and numbers of a hundred digits."""
    ok = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _LARGEST
    return value if ok else default


def whole(config: Mapping[str, Any], *keys: str, default: int = 0) -> int:
    """The first of ``keys`` that holds a positive number."""
    for key in keys:
        value = number(config.get(key), 0)
        if value:
            return int(value)
    return default


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
    linear = _linear_layers(text, architecture, layers)
    sliding = _sliding_layers(text, architecture, layers)
    dsa = architecture in _DSA and kv_lora > 0 and text.get("index_topk") is not None
    return Geometry(
        architecture=architecture,
        family=family or ("deepseek" if kv_lora else "qwen_hybrid" if linear else "llama"),
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
        moe_layers=_moe_layers(text, layers) if experts else frozenset(),
        nextn=min(MOST_LAYERS, whole(text, "num_nextn_predict_layers", "mtp_num_hidden_layers")),
        dsa=dsa,
        index_heads=whole(text, "index_n_heads"),
        index_head_dim=whole(text, "index_head_dim"),
        index_kpool=whole(text, "index_kpool", default=1),
        indexer_layers=frozenset(i for i in range(layers) if not _skips_topk(text, i)) if dsa else frozenset(),
        sliding_layers=sliding,
        linear_layers=linear,
        linear_key_heads=whole(text, "linear_num_key_heads"),
        linear_value_heads=whole(text, "linear_num_value_heads"),
        linear_key_dim=whole(text, "linear_key_head_dim"),
        linear_value_dim=whole(text, "linear_value_head_dim"),
        conv_kernel=whole(text, "linear_conv_kernel_dim", default=4),
        ssm_itemsize=2 if str(text.get("mamba_ssm_dtype")) in ("bfloat16", "float16") else 4,
        multimodal="vision_config" in config,
        vision=_vision(config.get("vision_config")),
        index_topk=whole(text, "index_topk"),
    )


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


def _moe_layers(text: Mapping[str, Any], layers: int) -> frozenset[int]:
    """Layers whose MLP is a mixture (deepseek_v2.py, qwen3_moe.py, glm4_moe.py)."""
    first = int(number(text.get("first_k_dense_replace"), 0))
    every = int(number(text.get("moe_layer_freq"), 1)) or 1
    # interleave_moe_layer_step: models/llama4.py
    step = int(number(text.get("decoder_sparse_step") or text.get("interleave_moe_layer_step"), 1)) or 1
    dense = text.get("mlp_only_layers")
    only = {x for x in dense if isinstance(x, int)} if isinstance(dense, list) else set()
    return frozenset(i for i in range(first, layers) if i % every == 0 and (i + 1) % step == 0 and i not in only)


def _sliding_layers(text: Mapping[str, Any], architecture: str, layers: int) -> frozenset[int]:
    """gpt-oss alternates when its config does not say (transformers' GptOssConfig)."""
    types = text.get("layer_types")
    if architecture not in _SWA_BY_LAYER_TYPES:
        return frozenset()
    if not isinstance(types, list):
        return frozenset(range(0, layers, 2)) if architecture == "GptOssForCausalLM" else frozenset()
    return frozenset(i for i, kind in enumerate(types[:layers]) if kind == "sliding_attention")


def _linear_layers(text: Mapping[str, Any], architecture: str, layers: int) -> frozenset[int]:
    """configs/qwen3_next.py:layers_block_type, configs/qwen3_5.py"""
    if not (text.get("linear_num_value_heads") or FAMILIES.get(architecture) == "qwen_hybrid"):
        return frozenset()
    types = text.get("layer_types")
    if isinstance(types, list) and len(types) >= layers:
        return frozenset(i for i in range(layers) if types[i] == "linear_attention")
    interval = int(number(text.get("full_attention_interval"), 4)) or 4
    return frozenset(i for i in range(layers) if (i + 1) % interval)


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
