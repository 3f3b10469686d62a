"""Speculative decoding with a checkpoint's own MTP layer: how deep it drafts, and what it needs beside it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..checkpoint.geometry import Geometry
from ..checkpoint.model import Checkpoint


@dataclass(frozen=True)
class Draft:
    """How an architecture drafts. ``steps``: tokens drafted one after another (no tree); ``reason``: where the depth is
    from; ``flags``: engine flags that it needs besides."""

    steps: int
    reason: str
    flags: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Rows that one request takes in a verifying step (speculative_hook.py: steps + 1 without a tree)."""
        return self.steps + 1

    def arguments(self) -> dict[str, Any]:
        """The engine's flags by option."""
        return {
            "--speculative-algorithm": "NEXTN",
            "--speculative-num-steps": self.steps,
            "--speculative-eagle-topk": 1,
            "--speculative-num-draft-tokens": self.tokens,
            **self.flags,
        }


# Public runs on 8x RTX PRO 6000: GLM-5.1 50 -> 91 tokens/s for one client, 261 -> 398 for 8, 1,069 -> 1,165 for 64.
_USUAL = Draft(3, "three steps: the engine's own depth, with which public runs served one client 1.8 times as fast")
_QWEN3_5 = Draft(
    2,
    "two steps: 108 -> 180 tokens/s for one client in public runs on four cards, more than three crashed; the state "
    "cache keeps an extra buffer for what is taken back",
    {"--mamba-radix-cache-strategy": "extra_buffer"},
)
_BY_ARCHITECTURE = dict.fromkeys(
    (
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
    ),
    _QWEN3_5,
)


def of(g: Geometry) -> Draft:
    """How a model of this architecture drafts."""
    return _BY_ARCHITECTURE.get(g.architecture, _USUAL)


def in_checkpoint(checkpoint: Checkpoint, g: Geometry) -> bool:
    """Whether the checkpoint has the weights of an MTP layer."""
    return any(
        f".layers.{g.layers}." in x.name or x.name.startswith("mtp.") or ".mtp." in x.name for x in checkpoint.groups
    )
