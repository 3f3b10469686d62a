"""Whether a config.json and the weights beside it can be of one model.

The engine does not ask: it loads what it finds into the shapes that the config announces. Weights of another size end
in a failed assertion after minutes; missing layers and missing scales end in noise. So they are refused here, in one
line that says what was found. Only what is certain counts: an unknown architecture is judged by nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from . import quantization
from .geometry import FAMILIES, LAYER_KEYS, text_config
from .numbers import whole
from .safetensors import TensorGroups

# Widths without which nothing can be planned, under each name that a config uses for it.
WIDTHS = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
}
_SIZES = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
# Methods whose tensors are stored quantised, whatever the engine could also do while it loads (sglang
# srt/layers/quantization: is_checkpoint_fp8_serialized and the like).
_STORED = {"fp8", "modelopt_fp8", "modelopt_fp4", "mxfp4", "awq", "gptq", "compressed-tensors"}
_PLAIN = {"BF16", "F16", "F32", "F64", "I64", "BOOL"}
_LAYER = re.compile(r"^(?:model\.|language_model\.|transformer\.)*(?:layers|h)\.(\d+)\.")
_EMBEDDING = re.compile(r"^(?:model\.|language_model\.)*embed_tokens\.weight$")
_LONGEST_NAME = 200


def unusable_config(config: Mapping[str, Any], architecture: str) -> str | None:
    """Return what makes ``config`` unusable, as the end of a sentence; None when nothing does."""
    if not (architecture.isprintable() and len(architecture) <= _LONGEST_NAME):
        return "names an architecture that is no name"
    text = text_config(config)
    for key in _SIZES:
        value = text.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
            return f"says {key} {value}"
    if architecture in FAMILIES:
        for name, keys in WIDTHS.items():
            if not whole(text, *keys):
                return f"lacks {name}"
    return None


def contradiction(
    config: Mapping[str, Any], architecture: str, method_config: Mapping[str, Any], found: TensorGroups
) -> str | None:
    """Return how the tensors contradict the config, as the end of a sentence; None when they do not."""
    method = quantization.method(method_config)
    dtypes = {dtype for _, dtype, _ in found.counts}
    if method in _STORED and dtypes and dtypes <= _PLAIN:
        return f"says {method}, and the weights beside it hold only {', '.join(sorted(dtypes))} tensors"
    if architecture not in FAMILIES:
        return None
    text = text_config(config)
    hidden, layers = whole(text, *WIDTHS["hidden_size"]), whole(text, *LAYER_KEYS)
    widths = {
        shape[1]
        for name, dtype, shape in found.counts
        if len(shape) == 2 and dtype in _PLAIN and _EMBEDDING.match(name)
    }
    if widths and widths != {hidden}:
        return f"says hidden_size {hidden}, and the weights beside it have {min(widths)}"
    present = _layers(name for name, _, _ in found.counts)
    if present and max(present) + 1 < layers:
        return f"says {layers} layers, and the weights beside it have {max(present) + 1}"
    return None


def _layers(names: Iterable[str]) -> set[int]:
    return {int(match[1]) for name in names if (match := _LAYER.match(name))}


def without_config(names: Iterable[str]) -> str | None:
    """Return what a directory of ``names`` without config.json is, and what to do; None when it is nothing known."""
    files = set(names)
    if "adapter_config.json" in files:
        return (
            "it is a LoRA adapter: serve its base model, with --enable-lora --lora-paths NAME=DIRECTORY in ENGINE_ARGS"
        )
    nested = sorted(name.removesuffix("/config.json") for name in files if name.endswith("/config.json"))
    if "modules.json" in files and nested:
        return f"it is a sentence-transformers model whose transformer is in {nested[0]}: name that directory"
    if any(name.endswith(".gguf") for name in files):
        return "it holds GGUF, which relaunch cannot plan: name a directory of safetensors"
    return None
