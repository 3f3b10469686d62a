"""A model in a plain directory."""

from __future__ import annotations

from pathlib import Path

from ..errors import Stop, unreadable
from . import manifest as manifests
from .common import Located, Manifest


def locate(model: str, root: Path, given: Manifest | None) -> Located:
    """Raises Stop: weights_missing when absent or no model, permission_denied when it cannot be read."""
    from .faults import denied

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
        names = manifests.listing(root)
    except PermissionError:
        raise denied(root, "RELAUNCH_MODEL") from None
    except OSError as error:
        raise unreadable(f"RELAUNCH_MODEL={model}: {error.strerror}", "check the directory and its mount") from None
    if "config.json" not in names:
        raise Stop(
            "weights_missing",
            f"RELAUNCH_MODEL={model}: {root} holds no config.json",
            "name the directory of a checkpoint in the hub's layout",
        )
    if given is not None:
        return Located("directory", model, None, root, given)
    known = manifests.from_metadata(root)
    if not known.entries:
        known = manifests.from_links(root)
    return Located("directory", model, None, root, known)
