"""What a checkpoint is: config.json, quantisation, every tensor's name, dtype, shape and bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import unreadable


@dataclass(frozen=True)
class Group:
    """Tensors that share a name pattern, dtype and shape. ``name`` has ``*`` where the expert's number stood;
    the layer's number stays. ``size`` is the bytes of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    size: int

    @property
    def bytes(self) -> int:
        return self.count * self.size


@dataclass(frozen=True)
class Checkpoint:
    """``model`` is the id as the user gave it. ``path`` is None when only remote headers were read.
    ``groups`` holds every tensor; ``generated`` says that they come from the architecture's table because
    there are no shards, or None when there is no table for it. ``quantization`` is the checkpoint's own
    quantisation config (config.json's, else hf_quant_config.json's), empty when there is none."""

    model: str
    revision: str | None
    path: Path | None
    config: Mapping[str, Any]
    architecture: str
    groups: tuple[Group, ...] = ()
    generated: bool = False
    quantization: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(group.bytes for group in self.groups)

    @property
    def tensors(self) -> int:
        """Number of tensors."""
        return sum(group.count for group in self.groups)


def read(directory: Path, *, model: str, revision: str | None = None) -> Checkpoint:
    """The checkpoint in ``directory``. Raises Stop (66) in one line when config.json cannot be used."""
    config = read_json(directory / "config.json", "give the model's directory or hub id in RELAUNCH_MODEL")
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else ""
    return Checkpoint(model, revision, directory, config, str(first))


def read_json(path: Path, fix: str) -> dict[str, Any]:
    """A JSON object from a file. Raises Stop (66) with one line."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(f"{path} cannot be read: {error.strerror}", fix) from None
    except ValueError as error:
        raise unreadable(f"{path} is not JSON: {error}", "fetch it again with `relaunch weights repair`") from None
    if not isinstance(data, dict):
        raise unreadable(f"{path} is not a JSON object", "fetch it again with `relaunch weights repair`")
    return data
