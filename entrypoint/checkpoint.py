"""What a checkpoint is: config.json, quantisation, every tensor's name, dtype, shape and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Checkpoint:
    """``model`` is the id as the user gave it. ``path`` is None when only remote headers were read."""

    model: str
    revision: str | None
    path: Path | None
    config: Mapping[str, Any]
    architecture: str
