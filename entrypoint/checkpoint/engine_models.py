"""What the pinned engine knows of models by name: its classes, and the sizes that a config.json may leave out.

`engine_models.json` is generated from the engine (`scripts/engine_models.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

# Other names under which configs give the same size.
_ALIASES: dict[str, tuple[str, ...]] = {
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "multi_query_group_num"),
    "intermediate_size": ("n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"),
}


@cache
def _table() -> dict[str, Any]:
    text = Path(__file__).with_name("engine_models.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def serves(architecture: str) -> bool:
    """Whether the engine has a class for ``architecture``, or takes transformers' own."""
    table = _table()
    return architecture in table["architectures"] or architecture in table["borrowed"]


def borrows(architecture: str) -> bool:
    """Whether the engine would run transformers' class, for want of its own."""
    return architecture in _table()["borrowed"]


def heads_everywhere(architecture: str) -> bool:
    """Whether the class keeps the output head on every pipeline stage, used or not."""
    return architecture in _table()["heads_everywhere"]


def completed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``config`` with what its class in transformers, or the engine's own, says of sizes that it leaves out; its
    parts (``text_config``) likewise."""
    model_type = config.get("model_type")
    defaults = _table()["defaults"].get(model_type) if isinstance(model_type, str) else None
    whole = dict(config)
    for name, value in (defaults or {}).items():
        part, _, inner = name.rpartition(".")
        if not part:
            if _lacks(whole, inner):
                whole[inner] = value
        elif isinstance(config.get(part), Mapping):
            held = whole[part]
            # Ties are said once, for the whole model.
            if _lacks(held, inner) and not (inner.startswith("tie_") and inner in config):
                whole[part] = {**held, inner: value}
    for part, held in whole.items():
        if isinstance(held, Mapping) and isinstance(held.get("model_type"), str) and held["model_type"] != model_type:
            whole[part] = completed(held) if part.endswith("_config") else held
    return whole


def _lacks(config: Mapping[str, Any], name: str) -> bool:
    return all(config.get(key) is None for key in (name, *_ALIASES.get(name, ())))
