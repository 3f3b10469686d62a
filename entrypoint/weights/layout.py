"""The hub cache's layout, read without the hub client: also read-only, also without ``trees/`` or ``refs/``."""

from __future__ import annotations

import json
import os
from pathlib import Path

from . import manifest as manifests
from .common import Manifest
from .reference import COMMIT


def commit_of(storage: Path, revision: str) -> str | None:
    """The commit that the cache remembers for a branch or tag; a commit names itself."""
    if COMMIT.fullmatch(revision):
        return revision
    if not manifests.safe(revision):
        return None
    try:
        text = (storage / "refs" / revision).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return text if COMMIT.fullmatch(text) else None


def only_snapshot(storage: Path) -> str | None:
    """The commit of the one snapshot that is there; None when there are none or several."""
    try:
        commits = [path.name for path in (storage / "snapshots").iterdir() if COMMIT.fullmatch(path.name)]
    except OSError:
        return None
    return commits[0] if len(commits) == 1 else None


def snapshot(storage: Path, commit: str) -> Path:
    return storage / "snapshots" / commit


def tree(storage: Path, commit: str) -> Manifest | None:
    """The listing that the hub client keeps. It is written with mode 0600, so another user finds it unreadable."""
    try:
        document = json.loads((storage / "trees" / f"{commit}.json").read_bytes())
        if document.get("format_version") != 1:
            return None
        return manifests.parse(document, "the cache's own listing")[1]
    except (OSError, ValueError, AttributeError):
        return None


def real_places(path: Path) -> list[Path]:
    """Every hop from a snapshot's file to its bytes, the bytes first: removing them in this order leaves nothing
    that the client could link again."""
    hops = [path]
    while hops[-1].is_symlink() and len(hops) < 8:
        hops.append(Path(os.path.normpath(hops[-1].parent / hops[-1].readlink())))
    return [hop for hop in reversed(hops) if os.path.lexists(hop)]


def first_hop(path: Path) -> str | None:
    """Name of the blob that a snapshot's file links to: its digest."""
    return path.readlink().name if path.is_symlink() else None


def free_bytes(path: Path) -> int:
    """Bytes that this user may write on the disk of ``path`` (which need not exist)."""
    from .faults import nearest

    status = os.statvfs(nearest(path))
    return status.f_bavail * status.f_frsize
