"""What `RELAUNCH_MODEL` names: a hub id, a directory, a model inside a Python package, or a generated one."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..errors import config_rejected

if TYPE_CHECKING:
    from ..config.schema import Settings

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Reference:
    """``value``: the id, the directory, the package's or the generator's name."""

    kind: Literal["hub", "directory", "package", "generated"]
    value: str


def parse(model: str | None) -> Reference:
    """Raises Stop (78) when the text can name nothing."""
    if not model:
        raise config_rejected("RELAUNCH_MODEL is not set", "name a hub id (org/name), a directory, or RELAUNCH_PRESET")
    for kind in ("package", "generated"):
        if model.startswith(f"{kind}:"):
            name = model.removeprefix(f"{kind}:")
            if not re.fullmatch(r"[\w.-]+", name):
                raise config_rejected(f"RELAUNCH_MODEL={model} names no {kind} model", f"write {kind}:NAME")
            return Reference("package" if kind == "package" else "generated", name)
    if model.startswith(("/", "./", "../", "~")) or model in (".", "..") or Path(model).is_dir():
        return Reference("directory", str(Path(model).expanduser()))
    if not _HUB_ID.fullmatch(model) or ".." in model or "--" in model:
        raise config_rejected(
            f"RELAUNCH_MODEL={model} is neither a hub id nor a directory",
            "write org/name, or a path that starts with /",
        )
    return Reference("hub", model)


def loads_dummy(settings: Settings) -> bool:
    """True when the engine is told to invent its weights (``--load-format dummy``): only the configuration
    and the tokenizer are read from disk then."""
    try:
        words = shlex.split(settings.engine_args)
    except ValueError:
        return False
    return "--load-format=dummy" in words or any(
        words[i : i + 2] == ["--load-format", "dummy"] for i in range(len(words))
    )
