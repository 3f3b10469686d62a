"""What must be alike on all nodes of a group, and what a node tells of its GPUs."""

from __future__ import annotations

import hashlib
import json

from .. import __version__
from ..config import engine_flags
from ..host.inventory import Inventory
from ..supervisor.launch import PreparedLaunch
from .messages import Card

# Each node's engine reads these from its own environment, and what they say of the stages must fit together.
_STAGES = ("SGLANG_PP_LAYER_PARTITION", "SGLANG_ENABLE_PP_SPEC")


def identity(prepared: PreparedLaunch) -> dict[str, str]:
    """Names as an operator reads them in a refusal. The model is told by its configuration and its size: the path to
    it may differ."""
    settings, checkpoint = prepared.loaded.settings, prepared.checkpoint
    config = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True, default=str).encode()).hexdigest()[:12]
    return {
        "relaunch": __version__,
        "sglang": engine_flags.engine_version(),
        "RELAUNCH_NNODES": str(settings.nnodes),
        "RELAUNCH_DIST_INIT_ADDR": str(settings.dist_init_addr),
        "model configuration": config,
        "model size": f"{prepared.snapshot.bytes} bytes",
        **{name: prepared.loaded.environment.get(name) or "unset" for name in _STAGES},
    }


def cards(box: Inventory) -> tuple[Card, ...]:
    return tuple(Card(gpu.index, gpu.name, gpu.sm, gpu.total_bytes, gpu.free_bytes) for gpu in box.gpus)
