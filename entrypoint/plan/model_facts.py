"""How long a model's context is, and whether it embeds or generates, as sglang derives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checkpoint.geometry import text_config
from ..checkpoint.model import Checkpoint
from ..checkpoint.numbers import number

# sglang utils/hf_transformers/common.py:CONTEXT_LENGTH_KEYS, in its order.
CONTEXT_KEYS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")

# sglang configs/model_config.py:is_generation_model
EMBEDDING_ARCHITECTURES = frozenset(
    {
        "LlamaEmbeddingModel",
        "MistralModel",
        "LlamaForSequenceClassification",
        "LlamaForSequenceClassificationWithNormal_Weights",
        "InternLM2ForRewardModel",
        "Qwen2ForRewardModel",
        "Qwen3ForRewardModel",
        "Qwen2ForSequenceClassification",
        "Qwen3ForSequenceClassification",
        "Qwen3Model",
        "CLIPModel",
        "BertModel",
        "Contriever",
        "BertForSequenceClassification",
        "XLMRobertaModel",
        "XLMRobertaForSequenceClassification",
        "Gemma2ForSequenceClassification",
        "EmbeddingGemma2Model",
        "Lfm2BidirectionalModel",
    }
)

# Encoders attend in both directions: no radix cache, no chunks.
ENCODERS = frozenset(
    {
        "BertModel",
        "Contriever",
        "BertForSequenceClassification",
        "XLMRobertaModel",
        "XLMRobertaForSequenceClassification",
    }
)


def derived_context(config: Mapping[str, Any]) -> int:
    """sglang utils/hf_transformers/common.py:get_context_length. GPT-2's config class reads ``n_positions``
    as max_position_embeddings."""
    text = text_config(config)
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    factor: float = 1
    if isinstance(scaling, Mapping) and "original_max_position_embeddings" not in scaling:
        factor = 1 if scaling.get("rope_type") == "llama3" else number(scaling.get("factor"), 1)
    for key in (*CONTEXT_KEYS, "n_positions", "n_ctx"):
        value = number(text.get(key), 0)
        if value:
            return int(factor * value)
    return 2048


def is_embedding(checkpoint: Checkpoint, asked: object = None) -> bool:
    """True when sglang will serve embeddings rather than text."""
    return bool(asked) or checkpoint.architecture in EMBEDDING_ARCHITECTURES
