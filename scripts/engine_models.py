"""Print entrypoint/checkpoint/engine_models.json from the pinned engine. Needs the engine installed.

usage: python scripts/engine_models.py > entrypoint/checkpoint/engine_models.json

Holds the architectures that the engine (or, through it, transformers) has a class for, those that keep the output head
on every pipeline stage, and what the classes of config.json say of the sizes that a config leaves out.
"""

from __future__ import annotations

import ast
import json
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

# What the planner reads of a language model's config.
FIELDS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "v_head_dim",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "attention_bias",
    "sliding_window",
    "sliding_window_pattern",
    "partial_rotary_factor",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "first_k_dense_replace",
)
PARTS = ("text_config", "vision_config", "audio_config", "thinker_config", "language_config", "llm_config")


def architectures() -> tuple[list[str], list[str]]:
    """(classes of the engine's own, classes that it borrows from transformers)."""
    from sglang.srt.models.registry import ModelRegistry
    from transformers.models.auto import modeling_auto

    own = sorted(ModelRegistry.get_supported_archs())
    borrowed: set[str] = set()
    for name in ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"):
        for value in getattr(modeling_auto, name, {}).values():
            borrowed |= {value} if isinstance(value, str) else set(value)
    return own, sorted(borrowed - set(own))


def heads_everywhere() -> list[str]:
    """Classes that build lm_head whatever the stage: `ParallelLMHead` under no question for the last rank."""
    import sglang.srt.models as models

    found = []
    for path in sorted(Path(models.__path__[0]).glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if "pp_proxy_tensors" not in path.read_text(encoding="utf-8"):
            continue
        found += [node.name for node in tree.body if isinstance(node, ast.ClassDef) and _builds(node.body)]
    return found


def _builds(body: list[ast.stmt]) -> bool:
    for node in body:
        if isinstance(node, ast.If) and "last_rank" in ast.unparse(node.test):
            continue
        inner = [*getattr(node, "body", ()), *getattr(node, "orelse", ())]
        if inner:
            if isinstance(node, ast.FunctionDef) and node.name != "__init__":
                continue
            if _builds(inner):
                return True
        elif isinstance(node, ast.Assign) and "ParallelLMHead(" in ast.unparse(node):
            return True
    return False


def defaults() -> dict[str, dict[str, Any]]:
    """By model_type: what its config class says of FIELDS, its parts named with a dot."""
    from sglang.srt.utils.hf_transformers import common  # noqa: F401  registers the engine's own classes
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    assert AutoConfig
    found: dict[str, dict[str, Any]] = {}
    for model_type in sorted(CONFIG_MAPPING.keys()):
        try:
            config = CONFIG_MAPPING[model_type]()
        except Exception:  # a class that wants arguments has no defaults to speak of
            continue
        values = _read(config, FIELDS)
        for part in PARTS:
            inner = getattr(config, part, None)
            if inner is not None and not isinstance(inner, dict):
                fields = FIELDS if part.startswith(("text", "lang", "llm", "think")) else VISION
                values |= {f"{part}.{name}": value for name, value in _read(inner, fields).items()}
        if "num_hidden_layers" in values or "text_config.num_hidden_layers" in values:
            found[model_type] = values
    return found


# What others may follow from.
SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers")
VISION = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "depth",
    "num_attention_heads",
    "patch_size",
    "image_size",
)


def _read(config: Any, fields: tuple[str, ...]) -> dict[str, Any]:
    """What the class says by itself: fields that follow from others are left out."""
    try:
        other = type(config)(**{name: _value(config, name) * 2 for name in SIZES if _value(config, name)})
    except Exception:
        other = config
    found = {name: _value(config, name) for name in fields}
    if found.get("head_dim") and found["head_dim"] * found["num_attention_heads"] == found["hidden_size"]:
        del found["head_dim"]
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, int | float | bool) and (name in SIZES or _value(other, name) == value)
    }


def _value(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # transformers refuses fields that differ from layer to layer
        return None


def document() -> str:
    """The whole file."""
    own, borrowed = architectures()
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(values)}" for name, values in defaults().items())
    return (
        f'{{"sglang": {json.dumps(version("sglang"))}, "transformers": {json.dumps(version("transformers"))},\n'
        f'"architectures": {json.dumps(own)},\n"borrowed": {json.dumps(borrowed)},\n'
        f'"heads_everywhere": {json.dumps(heads_everywhere())},\n"defaults": {{\n{rows}\n}}}}\n'
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.stdout.write(document())
