"""A checkpoint as the planner sees it: config.json, quantisation, every tensor's name, dtype, shape and bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from ..errors import unreadable
from . import consistency, engine_models, geometry, shards, tensors
from .engine_sizes import EngineSizes
from .safetensors import TensorGroups

LARGEST_JSON = 64 << 20
_REPAIR = "fetch it again with `relaunch weights repair`"


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
        """The bytes of all tensors of the group."""
        return self.count * self.size


@dataclass(frozen=True)
class Checkpoint:
    """``model`` is the id as the user gave it. ``path`` is None when only remote headers were read.
    ``groups`` holds every tensor; ``generated`` says that they come from the architecture's table because
    there are no shards. ``quantization`` is the checkpoint's own quantisation config (config.json's, else
    hf_quant_config.json's), empty when there is none; ``engine``: sizes that the installed engine was asked for."""

    model: str
    revision: str | None
    path: Path | None
    config: Mapping[str, Any]
    architecture: str
    groups: tuple[Group, ...] = ()
    generated: bool = False
    quantization: Mapping[str, Any] = field(default_factory=dict)
    engine: EngineSizes | None = None

    @property
    def well_known(self) -> bool:
        """Whether sizes that follow from config and headers were compared with the engine's own classes."""
        if self.architecture in geometry.FAMILIES:
            return True
        return not self.generated and self.architecture in geometry.KNOWN_BY_HEADERS

    @property
    def bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(group.bytes for group in self.groups)

    @property
    def tensors(self) -> int:
        """The number of tensors."""
        return sum(group.count for group in self.groups)


def read(directory: Path, *, model: str, revision: str | None = None) -> Checkpoint:
    """Return the checkpoint in ``directory``; one with config.json alone gets the tensors of its architecture's table.

    Raises Stop in one line: 66 when config.json cannot be used or a shard that the index names is absent, 65
    when a header is broken.
    """
    config = read_json(directory / "config.json", "give the model's directory or hub id in RELAUNCH_MODEL")
    separate = directory / "hf_quant_config.json"
    quantization = read_json(separate, "") if separate.is_file() else {}
    return assemble(config, quantization, shards.read(directory), model=model, revision=revision, path=directory)


def assemble(
    config: Mapping[str, Any],
    separate_quantization: Mapping[str, Any],
    found: TensorGroups | None,
    *,
    model: str,
    revision: str | None,
    path: Path | None,
) -> Checkpoint:
    """Return a checkpoint from what was read here or from the hub. ``found`` None: no shards, tensors generated.
    Raises Stop (66) when ``config`` says too little, or what the tensors contradict."""
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    architecture = first if isinstance(first, str) else ""
    config = engine_models.completed(config)
    lacking = geometry.lacks(config, architecture)
    if lacking:
        raise unreadable(f"{model}: its config.json lacks {lacking}: nothing can be planned for it", _REPAIR)
    problem = consistency.unusable_config(config, architecture)
    quantization = tensors.config_quantization(config) or separate_quantization
    if found is not None and problem is None:
        problem = consistency.contradiction(config, architecture, quantization, found)
    if problem:
        raise unreadable(f"{model}: its config.json {problem}", "give a directory whose files belong together")
    if found is not None:
        groups = tuple(Group(name, dtype, shape, n, size) for (name, dtype, shape), (n, size) in found.counts.items())
    else:
        shape = geometry.of(config, architecture)
        groups = tuple(
            Group(t.name, t.dtype, t.shape, t.copies, prod(t.shape) * tensors.ITEMSIZE[t.dtype])
            for t in tensors.generate(shape, quantization)
        )
    return Checkpoint(model, revision, path, config, architecture, groups, found is None, quantization)


def read_json(path: Path, fix: str) -> dict[str, Any]:
    """Return the JSON object in a file. Raises Stop (66), with ``fix`` as the next step when it cannot be read."""
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise unreadable(f"{path} is larger than any configuration", _REPAIR)
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(f"{path} cannot be read: {error.strerror}", fix) from None
    except (ValueError, RecursionError) as error:
        raise unreadable(f"{path} is not JSON: {error}", _REPAIR) from None
    if not isinstance(data, dict):
        raise unreadable(f"{path} is not a JSON object", _REPAIR)
    return data
