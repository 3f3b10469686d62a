"""What each layer of a language model does: attend in full or in a window, keep a state, or neither.

From sglang 0.5.23: configs/model_config.py (is_hybrid_swa_model, get_hybrid_layer_ids) for windows with a pool of their
own, and each config's ``mamba2_cache_params`` for states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .numbers import number, whole

Config = Mapping[str, Any]


@dataclass(frozen=True)
class StateShape:
    """The recurrent state of one layer and request (configs/mamba_utils.py: Mamba2StateShape, and KimiLinearStateShape
    with a group per head): ``heads`` matrices of ``head_dim`` x ``size``, and the last ``kernel`` - 1 inputs of a
    convolution over them and two times ``groups`` rows of ``size``."""

    groups: int = 0
    heads: int = 0
    head_dim: int = 0
    size: int = 0
    kernel: int = 4


@dataclass(frozen=True)
class WindowHeads:
    """Heads of keys and their widths in layers with a window of their own; 0: as in the others."""

    kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0


@dataclass(frozen=True)
class LayerKinds:
    """Numbers of the layers: ``attending`` hold keys and values, of which ``sliding`` have a pool of their own;
    ``linear`` keep a ``state``. A layer may attend and keep a state, or neither. ``experts``: the layers that are a
    mixture, None where the usual fields say it."""

    attending: frozenset[int]
    sliding: frozenset[int] = frozenset()
    linear: frozenset[int] = frozenset()
    state: StateShape = StateShape()
    window: WindowHeads = WindowHeads()
    experts: frozenset[int] | None = None


class _Hybrid(NamedTuple):
    """How one family says which layers keep a state, and of what shape."""

    linear: Callable[[Config, int], frozenset[int]]
    state: Callable[[Config], StateShape]
    attends_as_well: bool = False


def _typed(*words: str) -> Callable[[Config, int], frozenset[int]]:
    def layers(text: Config, count: int) -> frozenset[int]:
        kinds = text.get("layer_types") or text.get("layers_block_type")
        kinds = kinds if isinstance(kinds, list) else []
        return frozenset(i for i, kind in enumerate(kinds[:count]) if kind in words)

    return layers


def _gated_delta(text: Config, count: int) -> frozenset[int]:
    """configs/qwen3_next.py:layers_block_type, configs/qwen3_5.py"""
    types = text.get("layer_types")
    if isinstance(types, list) and len(types) >= count:
        return frozenset(i for i in range(count) if types[i] == "linear_attention")
    interval = int(number(text.get("full_attention_interval"), 4)) or 4
    return frozenset(i for i in range(count) if (i + 1) % interval)


def pattern(text: Config, count: int) -> str:
    """A letter a layer of a Nemotron-H model: M (Mamba), * (attention), - (MLP), E (experts); "" for other models."""
    letters = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}
    kinds = text.get("layers_block_type")
    if isinstance(kinds, list):
        return "".join(letters.get(str(kind), "?") for kind in kinds)[:count]
    word = text.get("hybrid_override_pattern")
    return word[:count] if isinstance(word, str) else ""


def _nemotron(text: Config, count: int) -> frozenset[int]:
    return frozenset(i for i, letter in enumerate(pattern(text, count)) if letter == "M")


def _delta_layers(text: Config, count: int) -> frozenset[int]:
    """configs/kimi_linear.py: numbers from one."""
    part = text.get("linear_attn_config")
    named = part.get("kda_layers") if isinstance(part, Mapping) else None
    named = named if isinstance(named, list) else []
    return frozenset(i - 1 for i in named if isinstance(i, int) and 0 < i <= count)


def _delta_state(text: Config) -> StateShape:
    part = text.get("linear_attn_config")
    part = part if isinstance(part, Mapping) else {}
    heads, wide = whole(part, "num_heads"), whole(part, "head_dim")
    return StateShape(heads, heads, wide, wide, whole(part, "short_conv_kernel_size", default=4))


def _gated_state(text: Config) -> StateShape:
    return StateShape(
        whole(text, "linear_num_key_heads"),
        whole(text, "linear_num_value_heads"),
        whole(text, "linear_value_head_dim"),
        whole(text, "linear_key_head_dim"),
        whole(text, "linear_conv_kernel_dim", default=4),
    )


def _mamba_state(text: Config) -> StateShape:
    return StateShape(
        whole(text, "n_groups", "mamba_n_groups", default=1),
        whole(text, "mamba_num_heads", "mamba_n_heads"),
        whole(text, "mamba_head_dim", "mamba_d_head"),
        whole(text, "ssm_state_size", "mamba_d_state"),
        whole(text, "conv_kernel", "mamba_d_conv", default=4),
    )


_GATED = _Hybrid(_gated_delta, _gated_state)
_DELTA = _Hybrid(_delta_layers, _delta_state)
_NEMOTRON = _Hybrid(_nemotron, _mamba_state)
_HYBRIDS: dict[str, _Hybrid] = {
    "Qwen3NextForCausalLM": _GATED,
    "Qwen3_5ForConditionalGeneration": _GATED,
    "Qwen3_5MoeForConditionalGeneration": _GATED,
    "Qwen3_5MoeForCausalLM": _GATED,
    "Qwen3_5ForCausalLM": _GATED,
    "KimiLinearForCausalLM": _DELTA,
    "NemotronHForCausalLM": _NEMOTRON,
    "NemotronHPuzzleForCausalLM": _NEMOTRON,
    "FalconH1ForCausalLM": _Hybrid(lambda _, count: frozenset(range(count)), _mamba_state, attends_as_well=True),
    "GraniteMoeHybridForCausalLM": _Hybrid(_typed("mamba"), _mamba_state),
}


def _by_types(text: Config, count: int) -> frozenset[int]:
    return _typed("sliding_attention")(text, count)


def _gpt_oss(text: Config, count: int) -> frozenset[int]:
    """Alternates when its config does not say (transformers' GptOssConfig)."""
    types = text.get("layer_types")
    return _by_types(text, count) if isinstance(types, list) else frozenset(range(0, count, 2))


def _patterned(text: Config, count: int) -> frozenset[int]:
    marks = text.get("hybrid_layer_pattern")
    return frozenset(i for i, mark in enumerate(marks[:count]) if mark == 1) if isinstance(marks, list) else frozenset()


_SLIDING: dict[str, Callable[[Config, int], frozenset[int]]] = {
    "GptOssForCausalLM": _gpt_oss,
    "Llama4ForConditionalGeneration": lambda _, count: frozenset(i for i in range(count) if (i + 1) % 4),
    **dict.fromkeys(("MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM"), _patterned),
    **dict.fromkeys(
        (
            "Step3p5ForCausalLM",
            "Step3p7ForConditionalGeneration",
            "Gemma4ForCausalLM",
            "Gemma4ForConditionalGeneration",
            "Gemma4UnifiedForConditionalGeneration",
            "LagunaForCausalLM",
            "MellumForCausalLM",
            "GraniteSWAForCausalLM",
            "GraniteMoeSWAForCausalLM",
            "IQuestQ1ForCausalLM",
        ),
        _by_types,
    ),
}


def _window(text: Config) -> WindowHeads:
    """configs/model_config.py: swa_head_dim, swa_v_head_dim, get_swa_num_kv_heads."""
    other = text.get("attention_other_setting")
    groups = whole(other, "num_attention_groups") if isinstance(other, Mapping) else 0
    wide = whole(text, "swa_head_dim")
    return WindowHeads(whole(text, "swa_num_key_value_heads") or groups, wide, whole(text, "swa_v_head_dim") or wide)


def of(text: Config, architecture: str, count: int) -> LayerKinds:
    """The kinds of ``count`` layers of a model whose language part is ``text``."""
    every = frozenset(range(count))
    hybrid = _HYBRIDS.get(architecture) or (_GATED if text.get("linear_num_value_heads") else None)
    if hybrid is not None:
        linear = hybrid.linear(text, count)
        letters = pattern(text, count)
        attending = every if hybrid.attends_as_well else every - linear
        experts = None
        if letters:
            attending = frozenset(i for i, letter in enumerate(letters) if letter == "*")
            experts = frozenset(i for i, letter in enumerate(letters) if letter == "E")
        return LayerKinds(attending, linear=linear, state=hybrid.state(text), experts=experts)
    says = _SLIDING.get(architecture)
    sliding = says(text, count) if says else frozenset()
    return LayerKinds(every, sliding, window=_window(text) if sliding else WindowHeads())
